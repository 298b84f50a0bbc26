//! Several ranks that are threads of one GPU, each with a stream of its own; the host adds up.

use super::*;

macro_rules! tests {
    ($($case:ident),* $(,)?) => {
        $(#[test]
        fn $case() {
            on_threads(gpu, distributed::$case);
        })*
    };
}
distributed::cases!(tests);

/// Where no rank has a row, the step is counted, because the host does not know.
#[test]
fn a_batch_without_rows_is_counted() {
    on_threads(gpu, |rank| {
        for warmup_steps in [0, 100] {
            let config = PowerNormConfig {
                warmup_steps,
                ..config(Some(4))
            };
            let (layer, _varmap) = layer_on(&rank.device, 48, config, DType::F64);
            let layer = layer.with_ranks(&rank.over);
            let (phi, nu, _) = state(&layer);
            let empty = Tensor::zeros((0, 48), DType::F64, &rank.device).unwrap();
            layer.forward(&empty).unwrap();
            same_state("no rows", &state(&layer), &(phi, nu, 1));
        }
    });
}

#[test]
fn a_communicator_that_gives_back_less_is_an_error() {
    distributed::a_communicator_that_gives_back_less(&gpu());
}
