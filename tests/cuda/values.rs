//! Values and gradients that need a GPU, or a CPU beside it.

use super::*;

#[test]
fn recordings_replay() {
    replay(&gpu(), DType::F64, 1e-12);
    replay(&gpu(), DType::F32, 1e-5);
}

/// More elements than 31 bits count, all of them copies of one tile: copies do not change the
/// means, so each fares as the tile alone, and the parameters' gradients add up.
#[test]
#[ignore = "needs 45 GB of GPU memory"]
fn a_batch_beyond_31_bits() {
    const TILES: usize = 2200;
    const ROWS: usize = 1000;
    const COLS: usize = 1024;
    const { assert!(TILES * ROWS * COLS > 1 << 31) };
    let gpu = gpu();
    let mut data = Data::on(&gpu, 3);
    let mut twin = Twin::new(&mut data, COLS, config(Some(8)), DType::F32);
    let mut tile = || Batch::random(&mut data, &[ROWS, COLS], DType::F16, false).xs;
    let mut last = tile();
    twin.check("before", &Batch::new(tile(), tile()), true);
    for train in [true, false] {
        let xs = Tensor::cat(&vec![&last; TILES], 0).unwrap();
        let xs = Var::from_tensor(&xs).unwrap();
        let y = forward(&twin.layer, &xs, None, train);
        let pass = match train {
            true => twin.oracle.train(&to_f64(&last), None),
            false => twin.oracle.evaluate(&to_f64(&last), None),
        };
        // The upstream gradient of `y` itself is ones.
        let grads = y.backward().unwrap();
        let expected = twin.oracle.backward(&pass, &vec![1.; ROWS * COLS]);

        let bound = |out| Bound {
            out,
            sums: DType::F32,
            n: 2 * (TILES * ROWS + COLS),
        };
        // The first copy, the one that the 31 bits end in, and the last.
        for copy in [0, (1 << 31) / (ROWS * COLS), TILES - 1] {
            let of = |all: &Tensor| {
                let copy = all.narrow(0, copy * ROWS, ROWS).unwrap();
                copy.force_contiguous().unwrap()
            };
            let what = |name| format!("{name} of copy {copy}, train {train}");
            assert_close(&what("y"), &of(&y), &pass.y, bound(DType::F16));
            let dx = of(grads.get(&xs).unwrap());
            assert_close(&what("dx"), &dx, &expected.dx, bound(DType::F16));
        }
        let mut dweight = expected.dweight;
        dweight.values.iter_mut().for_each(|v| *v *= TILES as f64);
        dweight.magnitude *= TILES as f64;
        let weight = twin.layer.weight().unwrap();
        let actual = grads.get(weight).unwrap();
        assert_close("dweight", actual, &dweight, bound(DType::F32));
        // A count, which `f32` holds exactly.
        let count = to_f64(grads.get(twin.layer.bias().unwrap()).unwrap());
        assert_eq!(count, [(TILES * ROWS) as f64; COLS]);
        twin.check_state("state", bound(DType::F32));
        last = tile();
    }
}
