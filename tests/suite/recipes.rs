//! Claims of the guide's recipes: the loss of an average in half precision, and a validation that
//! runs beside the training. The recipes' own code runs among the doctests.

use crate::common::*;
use candle::{DType, Module, Result, Tensor, Var};
use candle_nn::{AdamW, Linear, Optimizer, ParamsAdamW, VarBuilder, VarMap, linear};
use candle_powernorm::{Mode, PowerNorm, power_norm};
use std::sync::mpsc;

// Averages

/// A moving average that starts at 1, after 5000 steps of decay 0.999 towards 2. It is kept in
/// `kept`, and rounded to `dtype` at the end.
fn moving_average(kept: DType, dtype: DType) -> Result<f64> {
    let mut average = Tensor::ones(1, kept, &CPU)?;
    let weight = Tensor::full(2f32, 1, &CPU)?.to_dtype(dtype)?;
    for _ in 0..5000 {
        average = ((average * 0.999)? + (weight.to_dtype(kept)? * (1. - 0.999))?)?;
    }
    Ok(to_f64(&average.to_dtype(dtype)?)[0])
}

#[test]
fn a_moving_average_in_half_precision_stalls() -> Result<()> {
    let right = 2. - 0.999f64.powi(5000);
    assert!((right - 1.993).abs() < 5e-4);
    for (dtype, stalls_at) in [(DType::BF16, 1.), (DType::F16, 1.5)] {
        assert_eq!(moving_average(dtype, dtype)?, stalls_at);
        // Kept in F32, all that is lost is the last rounding.
        let (u, _) = precision(dtype);
        let got = moving_average(DType::F32, dtype)?;
        assert!((got - right).abs() <= 1.01 * u * right, "{dtype:?}: {got}");
    }
    Ok(())
}

/// Means of ten values near each other, as checkpoints have them: the worst error, relative to the
/// mean.
fn worst_mean(sums: DType, dtype: DType) -> Result<f64> {
    let mut data = Data::new(4);
    let center = data.uniform(10_000, 1., 2.);
    let values = (0..10).map(|_| {
        let moves = data.normal(center.len());
        let values: Vec<_> = (center.iter().zip(&moves))
            .map(|(c, m)| c + 0.02 * m)
            .collect();
        tensor(&values, &[values.len()], dtype)
    });
    let values = Tensor::stack(&values.collect::<Vec<_>>(), 0)?;
    let mean = values.to_dtype(sums)?.mean(0)?.to_dtype(dtype)?;
    let exact = to_f64(&values.to_dtype(DType::F64)?.mean(0)?);
    let errors = to_f64(&mean)
        .into_iter()
        .zip(exact)
        .map(|(got, exact)| (got / exact - 1.).abs());
    Ok(errors.fold(0., f64::max))
}

#[test]
fn a_mean_of_checkpoints_in_half_precision_is_off_by_several_roundings() -> Result<()> {
    for dtype in [DType::BF16, DType::F16] {
        let (u, _) = precision(dtype);
        let [short, long] = [worst_mean(dtype, dtype)?, worst_mean(DType::F32, dtype)?];
        println!("{dtype:?}: {short:e}, in F32 {long:e}");
        assert!(short > 2.5 * u, "{dtype:?}: {short}");
        assert!(long <= 1.001 * u, "{dtype:?}: {long}");
    }
    Ok(())
}

/// Gradients of micro-batches, as means: 64 parts of one size, each with the same gradient.
#[test]
fn a_sum_of_gradients_in_half_precision_is_off_by_several_roundings() -> Result<()> {
    let sum = |sums: DType| -> Result<f64> {
        let part = Tensor::full(0.01f32, 1, &CPU)?.to_dtype(DType::BF16)?;
        let mut sum = part.to_dtype(sums)?;
        for _ in 1..64 {
            sum = (sum + part.to_dtype(sums)?)?;
        }
        Ok(to_f64(&sum.to_dtype(DType::BF16)?)[0] / (64. * to_f64(&part)[0]) - 1.)
    };
    let [short, long] = [sum(DType::BF16)?, sum(DType::F32)?];
    println!("{short:e}, in F32 {long:e}");
    let (u, _) = precision(DType::BF16);
    assert!(
        short.abs() > 2.5 * u && long.abs() <= 1.001 * u,
        "{short}, {long}"
    );
    Ok(())
}

/// The size of AdamW's steps after 5000 steps with a gradient of 1, and after 5000 more with a
/// gradient of 0.1, at a rate of 1.
fn adam_steps(dtype: DType) -> Result<[f64; 2]> {
    let var = Var::zeros(1, dtype, &CPU)?;
    let params = ParamsAdamW {
        lr: 1.,
        weight_decay: 0.,
        eps: 1e-4,
        ..Default::default()
    };
    let mut optimizer = AdamW::new(vec![var.clone()], params)?;
    let mut steps = vec![];
    for gradient in [1., 0.1] {
        for _ in 0..5000 {
            var.set(&var.zeros_like()?)?;
            optimizer.backward_step(&(var.as_tensor() * gradient)?.sum_all()?)?;
        }
        steps.push(-to_f64(&var)[0]);
    }
    Ok([steps[0], steps[1]])
}

/// candle's AdamW keeps its moments in the parameter's dtype.
#[test]
fn adams_moments_stall_in_half_precision() -> Result<()> {
    let [first, then] = adam_steps(DType::F32)?;
    // The root of 1, and of 1 − 0.999^5000 parts of 0.1² and 0.999^5000 of 1.
    assert!(
        (first - 1.).abs() < 1e-3 && (then - 0.775).abs() < 1e-3,
        "{first}, {then}"
    );
    let [first, then] = adam_steps(DType::BF16)?;
    assert!(
        (first - 1.38).abs() < 0.01 && (then - 0.146).abs() < 0.01,
        "{first}, {then}"
    );
    let [first, then] = adam_steps(DType::F16)?;
    assert!(
        (first - 1.15).abs() < 0.01 && (then - 0.655).abs() < 0.01,
        "{first}, {then}"
    );
    Ok(())
}

// Activation checkpointing

/// The gradient of `weight` in two uses of one linear layer, recomputed from the last to the first
/// as in the guide. The gradient of an input is passed on as `pass` leaves it.
fn recomputed(weight: &Var, xs: &Tensor, pass: fn(&Tensor) -> Tensor) -> Result<Vec<f64>> {
    let layer = Linear::new(weight.as_tensor().clone(), None);
    let middle = layer.forward(xs)?.detach();
    let mut gradient = layer.forward(&middle)?.detach(); // of Σ y²/2
    let mut sum = weight.zeros_like()?;
    for input in [&middle, xs] {
        let input = Var::from_tensor(input)?;
        let gradients = (layer.forward(&input)? * &gradient)?
            .sum_all()?
            .backward()?;
        gradient = pass(gradients.get(&input).unwrap());
        sum = (sum + gradients.get(weight).unwrap())?;
    }
    Ok(to_f64(&sum.detach()))
}

/// candle's gradient of an input has a graph of its own, which leads to the weight that it was
/// multiplied by. The next backward walks it too.
#[test]
fn a_gradient_that_is_passed_on_is_detached_first() -> Result<()> {
    let mut data = Data::new(9);
    let weight = Var::from_tensor(&tensor(&data.normal(16), &[4, 4], DType::F64))?;
    let xs = tensor(&data.normal(12), &[3, 4], DType::F64);
    let layer = Linear::new(weight.as_tensor().clone(), None);
    let ys = layer.forward(&layer.forward(&xs)?)?;
    let gradients = (ys.sqr()?.sum_all()? / 2.)?.backward()?;
    let whole = gradients.get(&weight).unwrap();

    let detached = recomputed(&weight, &xs, |gradient| gradient.detach())?;
    assert_relative("detached", whole, &detached, 1e-12);
    let attached = recomputed(&weight, &xs, |gradient| gradient.clone())?;
    let off = |(a, b): (&f64, &f64)| (a - b).abs() > 1e-3 * b.abs();
    assert!(attached.iter().zip(&detached).any(off), "{attached:?}");
    Ok(())
}

// Training and validation at once

struct Model {
    linear: Linear,
    norm: PowerNorm,
}

impl Model {
    fn new(varmap: &VarMap, mode: &Mode) -> Result<Self> {
        let vb = VarBuilder::from_varmap(varmap, DType::F32, &CPU);
        Ok(Self {
            linear: linear(6, 8, vb.pp("linear"))?,
            norm: power_norm(8, 1e-5, vb.pp("norm"))?.with_mode(mode),
        })
    }

    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.norm.forward(&self.linear.forward(xs)?)
    }

    fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.norm.forward_t(&self.linear.forward(xs)?, train)
    }
}

fn batch() -> Tensor {
    tensor(&Data::new(6).normal(16 * 6), &[16, 6], DType::F32)
}

/// The mistake that `Mode`'s documentation warns of.
#[test]
fn a_scope_in_one_thread_makes_a_training_step_in_another_evaluate() {
    in_time(|| {
        let mode = Mode::train();
        let model = Model::new(&VarMap::new(), &mode).unwrap();
        let (open, opened) = mpsc::channel();
        let (close, closed) = mpsc::channel::<()>();
        let validation = std::thread::spawn(move || {
            let _guard = mode.eval_scope();
            open.send(()).unwrap();
            closed.recv().ok();
        });
        opened.recv().unwrap();
        let before = state(&model.norm);
        let ys = model.forward(&batch()).unwrap();
        ys.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        assert_eq!(state(&model.norm), before);
        drop(close);
        validation.join().unwrap();
        model.forward(&batch()).unwrap();
        assert_eq!(model.norm.steps().unwrap(), 1);
    });
}

/// Trains a model in this thread while another one validates by `validate`, and returns the
/// training's state.
fn trained_beside(
    validate: impl Fn(&Model, &Model, &Tensor) -> Result<Tensor> + Send + Sync,
) -> State {
    const STEPS: usize = 200;
    let varmap = VarMap::new();
    let model = Model::new(&varmap, &Mode::train()).unwrap();
    // Built before the training starts: both may make the variables.
    let validation = Model::new(&varmap, &Mode::eval()).unwrap();
    let weight = tensor(&Data::new(7).normal(8 * 6), &[8, 6], DType::F32);
    (var(&varmap, "linear.weight").set(&weight)).unwrap();
    (var(&varmap, "linear.bias").set(&Tensor::zeros(8, DType::F32, &CPU).unwrap())).unwrap();
    let (xs, dy) = (
        batch(),
        tensor(&Data::new(8).normal(16 * 8), &[16, 8], DType::F32),
    );
    let (done, stop) = mpsc::channel::<()>();
    let (started, start) = mpsc::channel();
    std::thread::scope(|scope| {
        let (validate, model, validation, xs) = (&validate, &model, &validation, &xs);
        let validating = scope.spawn(move || {
            let mut validations = 0;
            loop {
                assert_finite("a validation", &validate(model, validation, xs).unwrap());
                validations += 1;
                started.send(()).ok();
                if stop.try_recv() == Err(mpsc::TryRecvError::Disconnected) {
                    return validations;
                }
            }
        });
        start.recv().unwrap();
        for _ in 0..STEPS {
            let ys = model.forward(xs).unwrap();
            (ys * &dy).unwrap().sum_all().unwrap().backward().unwrap();
        }
        drop(done);
        assert!(validating.join().unwrap() > 1);
    });
    assert_eq!(model.norm.steps().unwrap(), STEPS);
    // Nothing trains now, and both evaluate alike.
    let expected = model.forward_t(&xs, false).unwrap();
    assert_same_bits("validation", &validation.forward(&xs).unwrap(), &expected);
    state(&model.norm)
}

/// Each way of the guide leaves the training as it is without a validation.
#[test]
fn a_validation_beside_the_training_moves_nothing() {
    in_time(|| {
        let alone = trained_beside(|_, _, xs| Ok(xs.clone()));
        let of_its_own = trained_beside(|_, validation, xs| validation.forward(xs));
        let by_argument = trained_beside(|model, _, xs| model.forward_t(xs, false));
        let by_clone = trained_beside(|model, _, xs| {
            let norm = model.norm.clone().with_mode(&Mode::eval());
            norm.forward(&model.linear.forward(xs)?)
        });
        for state in [of_its_own, by_argument, by_clone] {
            assert_eq!(state, alone);
        }
    });
}
