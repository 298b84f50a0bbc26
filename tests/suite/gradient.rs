//! The backward, in `f64`. Exact gradients are compared with central differences and with candle's
//! autograd on the composed formula. With running statistics the input's gradient is the paper's
//! approximation, which is compared with the oracle over many steps.
//!
//! The loss is Σ y·dy throughout, with random dy, weight and bias.

use crate::common::reference::{composed, Quantity};
use crate::common::{
    assert_close, assert_relative, assert_same_bits, backward, central_differences, forward,
    layer_of, run, spec, tensor, to_f64, var, Batch, Bound, Data, Outcome, Twin,
};
use candle::{DType, Tensor, Var};
use candle_powernorm::{PowerNormConfig, Recipe, Statistics};

struct Case {
    shape: &'static [usize],
    groups: Option<usize>,
    padded: bool,
    affine: bool,
    bias: bool,
}

#[rustfmt::skip]
const CASES: [Case; 7] = [
    Case { shape: &[5, 3, 8], groups: None, padded: false, affine: true, bias: true },
    Case { shape: &[4, 12], groups: Some(1), padded: false, affine: true, bias: false },
    Case { shape: &[2, 4, 12], groups: Some(3), padded: true, affine: true, bias: true },
    Case { shape: &[2, 3, 2, 6], groups: None, padded: true, affine: true, bias: false },
    Case { shape: &[7, 10], groups: Some(2), padded: true, affine: false, bias: true },
    Case { shape: &[9, 1], groups: None, padded: false, affine: false, bias: true },
    Case { shape: &[33, 33], groups: Some(1), padded: true, affine: true, bias: true },
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
    const ALL: [Self; 4] = [
        Self::Batch,
        Self::WarmUp,
        Self::RunningWithoutCorrection,
        Self::Evaluation,
    ];

    fn trains(self) -> bool {
        self != Self::Evaluation
    }

    fn config(self, case: &Case) -> PowerNormConfig {
        PowerNormConfig {
            warmup_steps: if self == Self::WarmUp { 3 } else { 0 },
            statistics: match self {
                Self::Batch => Statistics::Batch,
                _ => Statistics::Running,
            },
            group_scaling: case.groups,
            affine: case.affine,
            bias: case.bias,
            ..1e-5.into()
        }
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
    match &batch.keep {
        None => batch.dy.clone(),
        Some(keep) => {
            let keep = keep.to_dtype(batch.dy.dtype()).unwrap();
            let keep = keep.unsqueeze(keep.rank()).unwrap();
            batch.dy.broadcast_mul(&keep).unwrap()
        }
    }
}

#[test]
fn exact_gradients_agree_with_central_differences() {
    // Autograd checks the larger case, which has too many elements for a forward each.
    for (seed, case) in CASES[..CASES.len() - 1].iter().enumerate() {
        for way in Way::ALL {
            let (twin, batch) = way.twin(case, seed as u64);
            let train = way.trains();
            let outcome = run(&twin.layer, &batch, train);
            let check = |what: &str, actual: &Tensor, expected: Vec<f64>| {
                let what = format!("{way:?}, {:?}, {what}", case.shape);
                assert_relative(&what, actual, &expected, 1e-8);
            };
            let dx = central_differences(&to_f64(&batch.xs), |x| {
                loss(&twin, &tensor(x, case.shape, DType::F64), &batch, train)
            });
            check("dx", &outcome.dx, dx);
            check_parameters(&twin, &batch, train, &outcome, check);
        }
    }
}

/// Central differences in weight and bias.
fn check_parameters(
    twin: &Twin,
    batch: &Batch,
    train: bool,
    outcome: &Outcome,
    check: impl Fn(&str, &Tensor, Vec<f64>),
) {
    let parameters = [
        ("weight", twin.layer.weight(), &outcome.dweight),
        ("bias", twin.layer.bias(), &outcome.dbias),
    ];
    for (name, parameter, actual) in parameters {
        let (Some(parameter), Some(actual)) = (parameter, actual) else {
            continue;
        };
        let at = to_f64(parameter);
        let parameter = var(&twin.varmap, name);
        let set = |values: &[f64]| {
            let values = tensor(values, parameter.dims(), DType::F64);
            parameter.set(&values).unwrap();
        };
        let expected = central_differences(&at, |values| {
            set(values);
            loss(twin, &batch.xs, batch, train)
        });
        set(&at);
        check(&format!("d{name}"), actual, expected);
    }
}

/// Weight and bias gradients are exact whatever ν is, though the input's is not.
#[test]
fn parameter_gradients_are_exact_under_running_statistics() {
    for (seed, case) in CASES[..CASES.len() - 1].iter().enumerate() {
        let way = Way::RunningWithoutCorrection;
        let (mut twin, batch) = way.twin(case, 100 + seed as u64);
        let size = twin.oracle.nu.len();
        twin.oracle.nu = Data::new(seed as u64).uniform(size, -0.5, 0.5);
        reset(&twin);
        let outcome = run(&twin.layer, &batch, true);
        check_parameters(&twin, &batch, true, &outcome, |what, actual, expected| {
            let what = format!("{:?}, {what}", case.shape);
            assert_relative(&what, actual, &expected, 1e-8);
        });
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
            let pass = match way.trains() {
                true => twin.oracle.train(&x, mask.as_deref()),
                false => twin.oracle.evaluate(&x, mask.as_deref()),
            };
            let terms = twin.oracle.backward(&pass, &to_f64(&batch.dy));

            let outcome = run(&twin.layer, &batch, way.trains());
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

#[test]
fn trajectories_agree_with_the_oracle() {
    const STEPS: usize = 60;
    for recipe in [Recipe::Paper, Recipe::Fairseq] {
        for (seed, case) in CASES.iter().enumerate() {
            let mut data = Data::new(200 + seed as u64);
            let size = *case.shape.last().unwrap();
            let config = PowerNormConfig {
                recipe,
                alpha_fwd: 0.8,
                alpha_bwd: 0.95,
                warmup_steps: 5,
                ..Way::RunningWithoutCorrection.config(case)
            };
            let mut twin = Twin::new(&mut data, size, config, DType::F64);
            for step in 0..STEPS {
                let mut batch = Batch::random(&mut data, case.shape, DType::F64, case.padded);
                // The scale of the data drifts, so that Γ is not 1.
                let drift = 1. + 0.5 * (0.3 * step as f64).sin();
                batch.xs = (batch.xs * drift).unwrap();
                twin.check(&format!("{recipe:?}, {:?}", case.shape), &batch, true);
                if step % 10 == 9 {
                    twin.check("evaluation in between", &batch, false);
                }
            }
        }
    }
}

/// A mask, weight and bias that are views count like packed copies of them.
#[test]
fn strided_masks_and_parameters_are_read_as_they_lie() {
    let mut data = Data::new(350);
    let size = 4;
    let batch = Batch::random(&mut data, &[2, 3, size], DType::F64, false);
    let mask = [true, false, true, true, true, false];
    let parameter = |data: &mut Data| {
        // The second column of a matrix.
        let matrix = tensor(&data.normal(3 * size), &[size, 3], DType::F64);
        matrix.narrow(1, 1, 1).unwrap().squeeze(1).unwrap()
    };
    let strided = [parameter(&mut data), parameter(&mut data)];
    let packed = strided.clone().map(|t| t.force_contiguous().unwrap());
    let keep = batch.clone().masked(&mask).keep.unwrap();
    // The same mask, laid out the other way around.
    let strided_keep = keep.t().unwrap().force_contiguous().unwrap().t().unwrap();
    assert!(!strided_keep.is_contiguous() && !strided[0].is_contiguous());
    let [actual, expected] = [(strided, strided_keep), (packed, keep)].map(|(affine, keep)| {
        let layer = layer_of(affine.each_ref());
        let xs = Var::from_tensor(&batch.xs).unwrap();
        let y = forward(&layer, &xs, Some(&keep), true);
        let dx = backward(&y, &batch.dy).remove(&xs).unwrap();
        [y, dx, layer.running_phi().unwrap()]
    });
    for (k, name) in ["y", "dx", "ψ²"].into_iter().enumerate() {
        assert_same_bits(name, &actual[k], &expected[k]);
    }
}
