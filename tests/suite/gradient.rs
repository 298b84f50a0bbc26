//! The backward, in `f64`. Exact gradients are compared with central differences and with candle's
//! autograd on the composed formula. With running statistics the input's gradient is the paper's
//! approximation, which `golden.rs`, `properties.rs` and `devices/mod.rs` compare over many steps.
//!
//! The loss is Σ y·dy throughout, with random dy, weight and bias.

use crate::common::reference::{Quantity, composed};
use crate::common::*;
use candle::{DType, Module, Tensor, Var};
use candle_powernorm::{GroupScaling, PowerNormConfig, RmsNorm, Statistics};

struct Case {
    shape: &'static [usize],
    groups: Option<usize>,
    padded: bool,
    /// `affine` and `bias`.
    parameters: (bool, bool),
}

#[rustfmt::skip]
const CASES: [Case; 7] = [
    Case { shape: &[5, 3, 8], groups: None, padded: false, parameters: (true, true) },
    Case { shape: &[4, 12], groups: Some(1), padded: false, parameters: (true, false) },
    Case { shape: &[2, 4, 12], groups: Some(3), padded: true, parameters: (true, true) },
    Case { shape: &[2, 3, 2, 6], groups: None, padded: true, parameters: (true, false) },
    Case { shape: &[7, 10], groups: Some(2), padded: true, parameters: (false, true) },
    Case { shape: &[9, 1], groups: None, padded: false, parameters: (false, true) },
    Case { shape: &[33, 33], groups: Some(1), padded: true, parameters: (true, true) },
];

/// The ways to normalize whose gradient is exact.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// PN-V.
    Batch,
    WarmUp,
    /// A running statistic while ν is 0: the correction is absent, and D does not depend on the
    /// input.
    RunningWithoutCorrection,
    Evaluation,
}

impl Way {
    const ALL: [Self; 4] = {
        use Way::*;
        [Batch, WarmUp, RunningWithoutCorrection, Evaluation]
    };

    fn config(self, case: &Case) -> PowerNormConfig {
        let statistics = match self {
            Self::Batch => Statistics::Batch,
            _ => Statistics::Running,
        };
        1e-5.with_statistics(statistics)
            .with_warm_up(if self == Self::WarmUp { 3 } else { 0 })
            .with_groups(case.groups)
            .with_parameters(case.parameters)
    }

    /// A twin with a ψ² of its own in each channel, ν = 0, and a batch for it.
    fn twin(self, case: &Case, seed: u64) -> (Twin, Batch) {
        let mut data = Data::new(seed);
        let size = *case.shape.last().unwrap();
        let mut twin = Twin::new(&mut data, size, self.config(case), DType::F64);
        twin.oracle.phi = data.uniform(size, 0.5, 2.);
        reset(&twin);
        let batch = Batch::random(&mut data, case.shape, DType::F64, case.padded);
        (twin, batch)
    }
}

/// Puts the layer into the state of the oracle.
fn reset(twin: &Twin) {
    let oracle = &twin.oracle;
    let set = |name: &str, values: &[f64]| {
        let var = var(&twin.varmap, name);
        var.set(&tensor(values, var.dims(), var.dtype())).unwrap();
    };
    let share = 1. - oracle.spec.alpha_bwd;
    let ema_gz: Vec<f64> = oracle.nu.iter().map(|nu| nu / share).collect();
    set("running_phi", &oracle.phi);
    set("ema_gz", &ema_gz);
    set("iters", &[oracle.steps as f64]);
}

/// The loss of the layer's forward from the oracle's state. Padded rows are outside of it.
fn loss(twin: &Twin, xs: &Tensor, batch: &Batch, train: bool) -> f64 {
    reset(twin);
    let y = to_f64(&forward(&twin.layer, xs, batch.keep.as_ref(), train));
    let dy = to_f64(&dy_of_kept_rows(batch));
    y.iter().zip(dy).map(|(y, dy)| y * dy).sum()
}

fn dy_of_kept_rows(batch: &Batch) -> Tensor {
    let Some(keep) = &batch.keep else {
        return batch.dy.clone();
    };
    let keep = keep.to_dtype(batch.dy.dtype()).unwrap();
    let keep = keep.unsqueeze(keep.rank()).unwrap();
    batch.dy.broadcast_mul(&keep).unwrap()
}

#[test]
fn exact_gradients_agree_with_central_differences() {
    // Autograd checks the larger case, which has too many elements for a forward each.
    for (seed, case) in CASES[..CASES.len() - 1].iter().enumerate() {
        for way in Way::ALL {
            let (twin, batch) = way.twin(case, seed as u64);
            let train = way != Way::Evaluation;
            let outcome = run(&twin.layer, &batch, train);
            let check = |what: &str, actual: &Tensor, expected: Vec<f64>| {
                let what = format!("{way:?}, {:?}, {what}", case.shape);
                assert_relative(&what, actual, &expected, 1e-8);
            };
            let dx = central_differences(&to_f64(&batch.xs), |x| {
                loss(&twin, &tensor(x, case.shape, DType::F64), &batch, train)
            });
            check("dx", &outcome.dx, dx);
            for (name, actual) in [("weight", &outcome.dweight), ("bias", &outcome.dbias)] {
                let Some(actual) = actual else { continue };
                let parameter = var(&twin.varmap, name);
                let at = to_f64(&parameter);
                let set = |at: &[f64]| {
                    let values = tensor(at, parameter.dims(), DType::F64);
                    parameter.set(&values).unwrap();
                };
                let expected = central_differences(&at, |at| {
                    set(at);
                    loss(&twin, &batch.xs, &batch, train)
                });
                set(&at);
                check(&format!("d{name}"), actual, expected);
            }
        }
    }
}

#[test]
fn exact_gradients_agree_with_autograd() {
    for (seed, case) in CASES.iter().enumerate() {
        for way in Way::ALL {
            let (mut twin, batch) = way.twin(case, seed as u64);
            let size = twin.oracle.phi.len();
            let phi = match way {
                Way::Batch | Way::WarmUp => None,
                _ => Some(tensor(&twin.oracle.phi, &[size], DType::F64)),
            };
            let xs = Var::from_tensor(&batch.xs).unwrap();
            let [weight, bias] = [&twin.oracle.weight, &twin.oracle.bias]
                .map(|values| Var::from_tensor(&tensor(values, &[size], DType::F64)).unwrap());
            let (affine, spec) = (Some((&*weight, &*bias)), spec(twin.layer.config()));
            let y = composed(&xs, affine, batch.keep.as_ref(), phi.as_ref(), &spec).unwrap();
            let expected = backward(&y, &dy_of_kept_rows(&batch));

            // The oracle says how large the terms are that cancel in these gradients.
            let (x, mask) = (to_f64(&batch.xs), batch.mask());
            let train = way != Way::Evaluation;
            let pass = match train {
                true => twin.oracle.train(&x, mask.as_deref()),
                false => twin.oracle.evaluate(&x, mask.as_deref()),
            };
            let terms = twin.oracle.backward(&pass, &to_f64(&batch.dy));

            let outcome = run(&twin.layer, &batch, train);
            let rows = x.len() / size;
            let check = |what: &str, actual: &Option<Tensor>, of: &Var, terms: Quantity| {
                let Some(actual) = actual else {
                    return;
                };
                let expected = Quantity {
                    values: to_f64(expected.get(of).unwrap()),
                    ..terms
                };
                let what = format!("{way:?}, {:?}, {what}", case.shape);
                let bound = Bound::of(DType::F64, rows + size);
                assert_close(&what, actual, &expected, bound);
            };
            check("dx", &Some(outcome.dx), &xs, terms.dx);
            check("dweight", &outcome.dweight, &weight, terms.dweight);
            check("dbias", &outcome.dbias, &bias, terms.dbias);
        }
    }
}

/// A weight and a bias that are views count like packed copies of them.
#[test]
fn strided_parameters_are_read_as_they_lie() {
    let mut data = Data::new(350);
    let batch = Batch::random(&mut data, &[2, 3, 4], DType::F64, true);
    let matrix = tensor(&data.normal(4 * 2), &[4, 2], DType::F64);
    let columns = [0, 1].map(|column| matrix.get_on_dim(1, column).unwrap());
    let packed = (columns.each_ref()).map(|column| column.force_contiguous().unwrap());
    assert!(!columns[0].is_contiguous());
    let [actual, expected] = [columns, packed].map(|parameters| {
        let xs = Var::from_tensor(&batch.xs).unwrap();
        let y = forward(
            &layer_of(parameters.each_ref()),
            &xs,
            batch.keep.as_ref(),
            true,
        );
        let dx = backward(&y, &batch.dy).remove(&xs).unwrap();
        [y, dx]
    });
    for (actual, expected) in actual.iter().zip(&expected) {
        assert_same_bits("y, dx", actual, expected);
    }
}

/// candle's switch for derivatives of gradients.
const KEEP_GRAPHS: &str = "CANDLE_GRAD_DO_NOT_DETACH";

/// The layers whose gradients carry no graph, each with its input and its output.
fn first_derivatives() -> Vec<(&'static str, Var, Tensor)> {
    let mut data = Data::new(60);
    let mut rows = || {
        let values = data.normal(24);
        Var::from_tensor(&data.tensor(&values, &[4, 6], DType::F64)).unwrap()
    };
    let (norm, _) = layer(6, 1e-5.into(), DType::F64);
    let weight = Var::ones(6, DType::F64, &CPU).unwrap();
    let rms_norm = RmsNorm::new(weight.as_tensor().clone(), 1e-5);
    let xs = [rows(), rows(), rows(), rows()];
    let outputs = [
        norm.forward(&xs[0]).unwrap(),
        rms_norm.forward(&xs[1]).unwrap(),
        GroupScaling::new(2, 1e-5).unwrap().forward(&xs[2]).unwrap(),
        norm.forward_residual(&xs[3], &xs[3], None).unwrap().0,
    ];
    let names = ["power_norm", "rms_norm", "group_scaling", "power_norm"];
    (names.into_iter().zip(xs).zip(outputs))
        .map(|((name, xs), y)| (name, xs, y))
        .collect()
}

/// A penalty on a gradient would miss all that passes through the layer. [`run_with`] runs this
/// with candle's switch on.
#[test]
fn a_gradient_has_no_gradient() {
    let keeps = std::env::var_os(KEEP_GRAPHS).is_some();
    for (name, xs, y) in first_derivatives() {
        // A plain training step works either way.
        let gradients = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        let dx = gradients.get(&xs).unwrap();
        assert_finite(name, dx);
        let penalty = dx.sqr().unwrap().sum_all().unwrap();
        match keeps {
            true => {
                let text = message(penalty.backward());
                let expected = format!(
                    "{name}: expected a backward from a loss, \
                     got one through the gradients of another backward"
                );
                assert!(text.contains(&expected), "{name}: {text}");
            }
            false => assert!(penalty.backward().unwrap().get(&xs).is_none(), "{name}"),
        }
    }
}

#[test]
fn a_gradient_s_gradient_is_rejected_where_candle_would_take_it() {
    let (passed, text) = run_with(KEEP_GRAPHS, "1", &["gradient::a_gradient_has_no_gradient"]);
    assert!(passed, "{text}");
}

/// How many tensors candle has made so far: their ids are counted, and `Debug` shows them.
fn tensors_so_far() -> usize {
    let id = format!("{:?}", Tensor::new(0f32, &CPU).unwrap().id());
    let digits: String = id.chars().filter(char::is_ascii_digit).collect();
    digits.parse().unwrap()
}

/// How many tensors a backward from Σ y·dy makes.
fn tensors_of_backward(y: &Tensor, dy: &Tensor) -> usize {
    let loss = (y * dy).unwrap().sum_all().unwrap();
    let before = tensors_so_far();
    loss.backward().unwrap();
    tensors_so_far() - before
}

/// A transposed input costs a backward what a transposition costs, and no copy: that would be a node
/// of candle's graph, which fills a gradient with zeros and adds the layer's gradient to it.
///
/// Ids are counted in the whole process, so this only counts where it has a process of its own.
#[test]
fn a_transposed_input_adds_one_node() {
    if std::env::var_os(COUNTS_TENSORS).is_none() {
        return;
    }
    let mut data = Data::new(61);
    let mut rows = || {
        let values = data.normal(36);
        Var::from_tensor(&data.tensor(&values, &[6, 6], DType::F64)).unwrap()
    };
    let (xs, residual, dy) = (rows(), rows(), rows().as_detached_tensor());
    let (norm, _) = layer(6, 1e-5.into(), DType::F64);
    let weight = Var::ones(6, DType::F64, &CPU).unwrap();
    let rms_norm = RmsNorm::new(weight.as_tensor().clone(), 1e-5);
    let scaling = GroupScaling::new(2, 1e-5).unwrap();
    type Forward<'a> = &'a dyn Fn(&Tensor) -> candle::Result<Tensor>;
    let forwards: [(&str, Forward); 6] = [
        ("power_norm", &|xs| norm.forward_t(xs, true)),
        ("power_norm in evaluation", &|xs| norm.forward_t(xs, false)),
        ("rms_norm", &|xs| rms_norm.forward(xs)),
        ("group_scaling", &|xs| scaling.forward(xs)),
        ("input", &|xs| {
            Ok(rms_norm.forward_residual(xs, &residual)?.0)
        }),
        ("residual", &|xs| {
            Ok(rms_norm.forward_residual(&residual, xs)?.0)
        }),
    ];
    let count = |forward: Forward| {
        let of = |xs: &Tensor| tensors_of_backward(&forward(xs).unwrap(), &dy);
        of(&xs.t().unwrap()) - of(&xs)
    };
    let of_transposition = count(&|xs| xs * 2.);
    for (name, forward) in forwards {
        assert_eq!(count(forward), of_transposition, "{name}");
    }
}

const COUNTS_TENSORS: &str = "CANDLE_POWERNORM_TEST_COUNTS_TENSORS";

#[test]
fn no_copy_of_an_input_is_in_the_graph() {
    let test = "gradient::a_transposed_input_adds_one_node";
    let (passed, text) = run_with(COUNTS_TENSORS, "1", &[test]);
    assert!(passed, "{text}");
}
