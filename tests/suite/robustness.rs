//! Random layers live random lives. Whatever shapes, strides, dtypes, masks and values they get,
//! nothing panics and nothing harms the state. `PROPTEST_CASES` sets the number of cases.

use crate::cases;
use crate::common::reference::Quantity;
use crate::common::*;
use candle::{DType, Tensor, Var};
use candle_powernorm::{Mode, PowerNorm, PowerNormConfig, Recipe};
use proptest::prelude::*;
use proptest::sample::{Index, select};
use std::panic::{AssertUnwindSafe, catch_unwind};

// The layers that live

/// A layer to build.
#[derive(Clone, Debug)]
struct LayerCase {
    size: usize,
    config: PowerNormConfig,
    /// Dtype of the inputs, and of the builder.
    dtypes: (DType, DType),
    seed: u64,
}

impl LayerCase {
    fn build(&self) -> Twin {
        let mut data = Data::new(self.seed);
        Twin::new(&mut data, self.size, self.config, self.dtypes.1)
    }
}

prop_compose! {
    fn layer_cases()(
        // Chosen at random, few widths would be whole vectors of half precision.
        size in prop_oneof![3 => 1..=70usize, 1 => select(vec![16, 32, 48, 64])],
        groups in any::<Option<Index>>(),
        (input, fitting) in select(&DTYPES[..]),
        (_, other) in select(&DTYPES[..]),
        (recipe, statistics) in select(&KINDS[..]),
        (affine, bias) in select(&PARAMETERS[..]),
        warmup_steps in 0..4usize,
        alpha_fwd in 0.01..0.999,
        alpha_bwd in 0.01..0.999,
        seed in any::<u64>(),
    ) -> LayerCase {
        let divisors: Vec<usize> = (1..=size).filter(|&d| size.is_multiple_of(d)).collect();
        let config = PowerNormConfig {
            group_scaling: groups.map(|index| *index.get(&divisors)),
            alpha_fwd, alpha_bwd, warmup_steps, statistics, recipe, affine, bias,
            ..Default::default()
        };
        // Without parameters a layer of any builder takes any input.
        let builder = if affine { fitting } else { other };
        LayerCase { size, config, dtypes: (input, builder), seed }
    }
}

/// The place of one dimension in memory.
#[derive(Clone, Debug)]
struct Axis {
    /// Elements of the base that a `narrow` leaves out, on either side.
    margins: (usize, usize),
    /// 2 if every other element of the base is skipped.
    step: usize,
    /// The dimension is one element, broadcast with a stride of 0.
    repeated: bool,
    /// Dimensions lie in memory in the order of their places.
    place: u8,
}

fn axes() -> impl Strategy<Value = Vec<Axis>> {
    let margins = (0..3usize, 0..3usize);
    let steps = prop_oneof![4 => Just(1usize), 1 => Just(2usize)];
    let axis = |(margins, step, repeated, place)| Axis {
        margins,
        step,
        repeated,
        place,
    };
    let strided = (margins, steps, prop::bool::weighted(0.1), any::<u8>()).prop_map(axis);
    let transposed = any::<u8>().prop_map(move |place| axis(((0, 0), 1, false, place)));
    let packed = Just(axis(((0, 0), 1, false, 0)));
    prop::collection::vec(prop_oneof![strided, transposed, packed], MAX_RANK)
}

const MAX_RANK: usize = 4;

/// The dimensions in the order of their places.
fn in_memory(axes: &[Axis]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..axes.len()).collect();
    order.sort_by_key(|&axis| axes[axis].place);
    order
}

/// The shape of a base from which [`view`] makes a tensor of `dims`.
fn base_dims(dims: &[usize], axes: &[Axis]) -> Vec<usize> {
    in_memory(&axes[..dims.len()])
        .into_iter()
        .flat_map(|k| {
            let Axis { margins, step, .. } = axes[k];
            let len = if axes[k].repeated { 1 } else { dims[k] };
            [margins.0 + len + margins.1, step]
        })
        .collect()
}

fn view(base: &Tensor, dims: &[usize], axes: &[Axis]) -> candle::Result<Tensor> {
    let order = in_memory(&axes[..dims.len()]);
    let mut view = base.clone();
    for (place, &k) in order.iter().enumerate() {
        let len = if axes[k].repeated { 1 } else { dims[k] };
        view = view.narrow(place, axes[k].margins.0, len)?;
        view = view.narrow(place + 1, 0, 1)?.squeeze(place + 1)?;
    }
    let places: Vec<usize> = (0..dims.len())
        .map(|k| order.iter().position(|&axis| axis == k).unwrap())
        .collect();
    view.permute(places)?.broadcast_as(dims)
}

/// The elements of a view. For an empty view that begins past the end of its storage, candle would
/// panic.
fn elements(view: &Tensor) -> Vec<f64> {
    match view.elem_count() {
        0 => vec![],
        _ => to_f64(view),
    }
}

/// The values of tensors.
#[derive(Clone, Copy, Debug)]
enum Values {
    Normal,
    Zeros,
    Huge,
    Tiny,
    /// Normal values, but one in 32 is special.
    Poisoned,
    /// Every second value is special.
    Special,
}

fn values() -> impl Strategy<Value = Values> {
    use Values::*;
    prop_oneof![3 => Just(Normal), 1 => select(vec![Zeros, Huge, Tiny, Poisoned, Special])]
}

/// Values that break arithmetic in one dtype or another.
const SPECIAL: [f64; 14] = {
    const INF: f64 = f64::INFINITY;
    const NAN: f64 = f64::NAN;
    [
        NAN, INF, -INF, 0., -0., 1e4, -6e4, 3e19, -1e30, 1e300, 1e-7, 1e-30, -1e-40, 1e-310,
    ]
};

impl Values {
    fn fill(self, data: &mut Data, len: usize) -> Vec<f64> {
        let special = match self {
            Values::Poisoned => 1. / 32.,
            Values::Special => 0.5,
            _ => 0.,
        };
        let choices = data.uniform(len, 0., 1.);
        let which = data.uniform(len, 0., SPECIAL.len() as f64);
        let scale = match self {
            Values::Zeros => 0.,
            Values::Huge => 1e30,
            Values::Tiny => 1e-40,
            _ => 1.,
        };
        let normal = data.normal(len);
        (0..len)
            .map(|k| match choices[k] < special {
                true => SPECIAL[which[k] as usize],
                false => scale * normal[k],
            })
            .collect()
    }
}

/// A batch to make for a layer.
#[derive(Clone, Debug)]
struct BatchCase {
    /// The dimensions before the last.
    leading: Vec<usize>,
    axes: Vec<Axis>,
    values: Values,
    dy: Values,
    mask: Option<MaskCase>,
    /// The axes of the residual, if there is one.
    residual: Option<Vec<Axis>>,
    seed: u64,
}

#[derive(Clone, Debug)]
struct MaskCase {
    /// The share of rows that are kept.
    kept: f64,
    axes: Vec<Axis>,
}

prop_compose! {
    fn mask_cases()(kept in select(vec![0., 0.5, 0.9, 1.]), axes in axes()) -> MaskCase {
        MaskCase { kept, axes }
    }
}

prop_compose! {
    fn batch_cases()(
        leading in prop::collection::vec(prop_oneof![1 => Just(0), 15 => 1..5usize], 0..MAX_RANK),
        axes in axes(),
        values in values(),
        dy in values(),
        mask in prop::option::of(mask_cases()),
        residual in prop::option::weighted(0.3, axes()),
        seed in any::<u64>(),
    ) -> BatchCase {
        BatchCase { leading, axes, values, dy, mask, residual, seed }
    }
}

#[derive(Clone, Debug)]
enum Event {
    /// A forward, and this many walks of its graph.
    Batch {
        batch: BatchCase,
        train: bool,
        walks: usize,
    },
    /// Walks the graph of the last training forward, if there was one.
    Walk,
    Reset,
    /// Replaces the layer by a clone.
    Clone,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let batch = (batch_cases(), prop::bool::weighted(0.7), 0..3usize);
    let batch = batch.prop_map(|(batch, train, walks)| Event::Batch {
        batch,
        train,
        walks,
    });
    let event = prop_oneof![
        8 => batch,
        1 => Just(Event::Walk),
        1 => Just(Event::Reset),
        1 => Just(Event::Clone),
    ];
    prop::collection::vec(event, 1..8)
}

// Lives

/// The bits of a tensor; all NaN are one.
fn canonical(tensor: &Tensor) -> Vec<u64> {
    let one_nan = |value: f64| if value.is_nan() { f64::NAN } else { value };
    (to_f64(tensor).into_iter().map(one_nan))
        .map(f64::to_bits)
        .collect()
}

/// ψ², ν and t; all NaN are one.
fn statistics(layer: &PowerNorm) -> State {
    (
        canonical(&layer.running_phi().unwrap()),
        canonical(&layer.nu().unwrap()),
        layer.steps().unwrap(),
    )
}

/// The inputs of a forward and the loss of its output. An input that was a view is here as its base
/// and the axes that make the view.
struct Graph {
    inputs: Vec<(Tensor, Vec<Axis>)>,
    loss: Tensor,
}

/// Two layers that live the same life and must come to the same bits. The first gets views, and the
/// second packed copies of them. If the first gets a residual, the second gets the sum, and if the
/// first gets a mask that keeps every row, the second gets none. Under recipe Paper the second's
/// padding holds other numbers.
struct Life {
    case: LayerCase,
    layer: PowerNorm,
    packed: PowerNorm,
    /// The graphs of the last training forward, in both layers.
    graphs: Option<(Graph, Graph)>,
}

impl Life {
    fn new(case: &LayerCase) -> Self {
        Self {
            case: case.clone(),
            layer: case.build().layer,
            packed: case.build().layer,
            graphs: None,
        }
    }

    fn live(&mut self, event: &Event) {
        match event {
            Event::Batch {
                batch,
                train,
                walks,
            } => {
                let graphs = self.forward(batch, *train);
                for _ in 0..*walks {
                    self.walk(&graphs, *train);
                }
                if *train {
                    self.graphs = Some(graphs);
                }
            }
            Event::Walk => {
                if let Some(graphs) = self.graphs.take() {
                    self.walk(&graphs, true);
                }
            }
            Event::Reset => {
                for layer in [&self.layer, &self.packed] {
                    layer.reset_running_stats().unwrap();
                }
                let ones = vec![1f64.to_bits(); self.case.size];
                let zeros = vec![0; self.case.size];
                assert_eq!(state(&self.layer), (ones, zeros, 0));
            }
            Event::Clone => self.layer = self.layer.clone(),
        }
        assert_eq!(statistics(&self.layer), statistics(&self.packed));
        if self.case.config.recipe == Recipe::Paper {
            let phi = self.layer.running_phi().unwrap();
            assert_finite_state("a life", &self.layer);
            assert!(to_f64(&phi).iter().all(|&phi| phi >= 0.));
        }
    }

    fn forward(&self, batch: &BatchCase, train: bool) -> (Graph, Graph) {
        let LayerCase { size, config, .. } = self.case;
        let dtype = self.case.dtypes.0;
        let mut data = Data::new(batch.seed);
        let dims: Vec<usize> = batch.leading.iter().copied().chain([size]).collect();
        let mut viewed = |axes: &[Axis]| {
            let base_dims = base_dims(&dims, axes);
            let base = batch.values.fill(&mut data, base_dims.iter().product());
            let base = Var::from_tensor(&tensor(&base, &base_dims, dtype)).unwrap();
            let xs = view(&base, &dims, axes).unwrap();
            ((base.as_tensor().clone(), axes.to_vec()), xs)
        };
        let (input, mut xs) = viewed(&batch.axes);
        let mut inputs = vec![input];
        let mut residual = None;
        if let Some(axes) = &batch.residual {
            let (input, view) = viewed(axes);
            inputs.push(input);
            residual = Some((xs.clone(), view.clone()));
            xs = add_rounded(&xs, &view).unwrap();
        }
        let rows = dims.iter().product::<usize>() / size;
        let dy = batch.dy.fill(&mut data, rows * size);
        let mask = batch.mask.as_ref().map(|mask| mask.make(batch, &mut data));
        let kept: Vec<bool> = match &mask {
            Some(mask) => elements(mask).iter().map(|&keep| keep != 0.).collect(),
            None => vec![true; rows],
        };

        // Other numbers in the padding of both tensors.
        let repad = |values: &[f64], data: &mut Data| {
            let padding = Values::Special.fill(data, values.len());
            let padded = |k: usize| config.recipe == Recipe::Paper && !kept[k / size];
            let repadded =
                (0..values.len()).map(|k| if padded(k) { padding[k] } else { values[k] });
            tensor(&repadded.collect::<Vec<_>>(), &dims, dtype)
        };
        let packed_xs = Var::from_tensor(&repad(&elements(&xs), &mut data)).unwrap();
        let packed_dy = repad(&dy, &mut data);
        let packed_mask = kept.contains(&false).then(|| keep(&kept, &batch.leading));

        let (phi, nu, steps) = state(&self.layer);
        let y = match &residual {
            Some((addend, residual)) => {
                let mode = if train { Mode::train() } else { Mode::eval() };
                let layer = self.layer.clone().with_mode(&mode);
                let outputs = layer.forward_residual(addend, residual, mask.as_ref());
                let (y, sum) = outputs.unwrap();
                // For empty tensors candle's sum is its argument, which may be a view.
                if rows > 0 {
                    assert_eq!(canonical(&sum), canonical(&xs));
                }
                y
            }
            None => forward(&self.layer, &xs, mask.as_ref(), train),
        };
        let packed_y = forward(&self.packed, &packed_xs, packed_mask.as_ref(), train);
        assert_eq!((y.dims(), y.dtype()), (&dims[..], dtype));
        let rows_of = |y: &Tensor| -> Vec<Vec<u64>> {
            let rows = canonical(y);
            rows.chunks(size).map(<[u64]>::to_vec).collect()
        };
        let (y_rows, packed_rows) = (rows_of(&y), rows_of(&packed_y));
        for row in 0..rows {
            if kept[row] || config.recipe == Recipe::Fairseq {
                assert_eq!(y_rows[row], packed_rows[row], "row {row} of {rows}");
            }
        }
        let after = state(&self.layer);
        if train && kept.contains(&true) {
            assert_eq!(
                (&after.1, after.2),
                (&nu, steps + 1),
                "a step moves ψ² and t"
            );
        } else {
            let counted = train && rows > 0 && counts_masked_batches(&CPU);
            let steps = steps + usize::from(counted);
            assert_eq!(after, (phi, nu, steps), "no step moves nothing");
        }
        // The evaluation of a row does not depend on the rows beside it.
        if !train && rows > 0 {
            let row = data.uniform(1, 0., rows as f64)[0] as usize;
            let alone = xs.detach().reshape((rows, size)).unwrap().get(row).unwrap();
            let alone = forward(&self.layer, &alone, None, false);
            assert_eq!(canonical(&alone), y_rows[row], "row {row} alone");
        }

        let graph = |inputs, y: &Tensor, dy: &Tensor| Graph {
            inputs,
            loss: (y * dy).unwrap().sum_all().unwrap(),
        };
        let packed = vec![(packed_xs.as_tensor().clone(), vec![])];
        (
            graph(inputs, &y, &tensor(&dy, &dims, dtype)),
            graph(packed, &packed_y, &packed_dy),
        )
    }

    fn walk(&self, (graph, packed): &(Graph, Graph), train: bool) {
        let (phi, nu, steps) = state(&self.layer);
        let grads = graph.loss.backward().unwrap();
        let packed_grads = packed.loss.backward().unwrap();
        let affine = [
            self.layer.weight().zip(self.packed.weight()),
            self.layer.bias().zip(self.packed.bias()),
        ];
        for (ours, theirs) in affine.into_iter().flatten() {
            let gradient = grads.get(ours).unwrap();
            assert_eq!(gradient.dims(), ours.dims());
            assert_eq!(gradient.dtype(), ours.dtype());
            let expected = packed_grads.get(theirs).unwrap();
            assert_eq!(canonical(gradient), canonical(expected));
        }
        let (input, _) = &packed.inputs[0];
        let dx = packed_grads.get(input).unwrap();
        assert_eq!(dx.dims(), input.dims());
        if dx.elem_count() == 0 {
            return;
        }
        for (input, axes) in &graph.inputs {
            // The gradient of the base, if the view's is `dx`.
            let base = Var::from_tensor(&input.detach()).unwrap();
            let xs = view(&base, dx.dims(), axes).unwrap();
            let expected = backward(&xs, dx);
            let (gradient, expected) = (grads.get(input).unwrap(), expected.get(&base).unwrap());
            assert_eq!(canonical(gradient), canonical(expected));
        }

        let after = state(&self.layer);
        assert_eq!(
            (&after.0, after.2),
            (&phi, steps),
            "a backward moves ν alone"
        );
        if !train {
            assert_eq!(after.1, nu, "and no ν for an evaluation");
        }
    }
}

impl MaskCase {
    fn make(&self, batch: &BatchCase, data: &mut Data) -> Tensor {
        let base_dims = base_dims(&batch.leading, &self.axes);
        let base = data.uniform(base_dims.iter().product(), 0., 1.);
        let base: Vec<bool> = base.iter().map(|&value| value < self.kept).collect();
        view(&keep(&base, &base_dims), &batch.leading, &self.axes).unwrap()
    }
}

proptest! {
    #![proptest_config(cases(500))]

    /// Nothing panics. Only steps move the state, and under recipe Paper it stays finite. Views,
    /// packed copies and copies with other padding give the same bits. A row's evaluation does not
    /// depend on the rows beside it.
    #[test]
    fn random_lives(case in layer_cases(), events in events()) {
        let mut life = Life::new(&case);
        for event in &events {
            life.live(event);
        }
    }
}

/// The layer once sliced a mask by its offset, which is 1 here, in a storage of nothing, and
/// panicked. In candle's own operations it did so with one channel only.
#[test]
fn a_mask_of_nothing_may_begin_past_its_storage() {
    for size in [1, 3] {
        let (layer, _varmap) = layer(size, 1e-5.into(), DType::F32);
        let keep = Tensor::zeros((0, 2), DType::U8, &CPU).unwrap();
        let keep = keep.narrow(1, 1, 1).unwrap().squeeze(1).unwrap();
        let xs = Var::zeros((0, size), DType::F32, &CPU).unwrap();
        let y = forward(&layer, &xs, Some(&keep), true);
        assert_eq!(y.backward().unwrap().get(&xs).unwrap().dims(), [0, size]);
        assert_eq!(layer.steps().unwrap(), 0);
    }
}

// Lives that an oracle follows

/// A step of a life that goes wrong at times.
#[derive(Clone, Copy, Debug)]
enum Step {
    Clean,
    Evaluation,
    /// Every row is padding.
    Padding,
    Poison(Poison),
}

/// This many elements of the input, or of the output's gradient, are poison.
#[derive(Clone, Copy, Debug)]
struct Poison {
    value: f64,
    elements: usize,
    gradient: bool,
}

/// A poison whose square overflows: 1e30 where sums are `f32`.
const OVERFLOW: f64 = 1e200;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let poison = select(vec![f64::NAN, f64::INFINITY, -f64::INFINITY, OVERFLOW]);
    let poison = (poison, 1..4usize, any::<bool>()).prop_map(|(value, elements, gradient)| {
        // A gradient is not squared.
        let gradient = gradient && !value.is_finite();
        Step::Poison(Poison {
            value,
            elements,
            gradient,
        })
    });
    let step = prop_oneof![
        4 => Just(Step::Clean),
        1 => Just(Step::Evaluation),
        1 => Just(Step::Padding),
        4 => poison,
    ];
    prop::collection::vec(step, 1..12)
}

/// The poisoned batch, and its input as the oracle gets it.
fn poisoned(mut batch: Batch, poison: Poison, data: &mut Data, grouped: bool) -> (Batch, Vec<f64>) {
    let dtype = batch.xs.dtype();
    let value = match poison.value.is_finite() && dtype != DType::F64 {
        true => 1e30,
        false => poison.value,
    };
    let target = match poison.gradient {
        true => &mut batch.dy,
        false => &mut batch.xs,
    };
    let mut values = to_f64(target);
    for at in data.uniform(poison.elements, 0., values.len() as f64) {
        values[at as usize] = value;
    }
    *target = tensor(&values, target.dims(), dtype);
    // The layer forgets squares that overflow, except with group scaling, which can take them. An
    // infinity makes its whole group NaN. The oracle's equations would give 0 for the other
    // elements.
    let forgotten = |x: f64| !x.is_finite() || (!grouped && x.abs() >= 1e30);
    let seen = to_f64(&batch.xs).into_iter();
    let seen = seen.map(|x| if forgotten(x) { f64::NAN } else { x });
    (batch, seen.collect())
}

proptest! {
    #![proptest_config(cases(500))]

    /// Whatever came, the layer is where the equations lead if they forget what is not finite. An
    /// oracle in f64 takes the same steps, without what the layer should forget.
    #[test]
    fn a_poisoned_history_is_that_of_its_finite_part(
        case in layer_cases(), rows in 2..8usize, steps in steps(), seed: u64,
    ) {
        let config = PowerNormConfig { recipe: Recipe::Paper, ..case.config };
        let case = LayerCase { config, ..case };
        let dtype = case.dtypes.0;
        let grouped = config.group_scaling.is_some();
        let mut twin = case.build();
        let mut data = Data::new(seed);
        for (k, &step) in steps.iter().enumerate() {
            let padded = seed >> k & 1 == 1;
            let batch = Batch::random(&mut data, &[rows, case.size], dtype, padded);
            let what = format!("{k}: {step:?}");
            match step {
                Step::Clean => twin.check(&what, &batch, true),
                Step::Evaluation => twin.check(&what, &batch, false),
                Step::Padding => {
                    let (phi, nu, t) = state(&twin.layer);
                    run(&twin.layer, &batch.masked(&vec![false; rows]), true);
                    let counted = usize::from(counts_masked_batches(&CPU));
                    prop_assert_eq!(state(&twin.layer), (phi, nu, t + counted));
                    twin.oracle.steps += counted;
                }
                // The group scaling can take these numbers, and the oracle's cannot.
                Step::Poison(Poison { value: OVERFLOW, .. }) if grouped && dtype == DType::F64 => {}
                Step::Poison(poison) => {
                    let (batch, seen) = poisoned(batch, poison, &mut data, grouped);
                    run(&twin.layer, &batch, true);
                    let pass = twin.oracle.train(&seen, batch.mask().as_deref());
                    twin.oracle.backward(&pass, &to_f64(&batch.dy));
                    let out = twin.layer.running_phi().unwrap().dtype();
                    let sums = sums_of(dtype);
                    let n = (rows + case.size) * twin.oracle.steps.max(1);
                    twin.check_state(&what, Bound { out, sums: coarser(sums, out), n });
                }
            }
        }
    }
}

/// Numbers beyond the largest of F16 may become infinite, and no other number may.
#[test]
fn infinity_is_close_to_what_overflows() {
    let (values, magnitude) = (vec![-7e4, 65519., 6e4], 1.);
    let exact = Quantity { values, magnitude };
    let bound = Bound {
        sums: DType::F32,
        ..Bound::of(DType::F16, 1)
    };
    let close = |values: [f64; 3]| {
        let actual = tensor(&values, &[3], DType::F16);
        let check = || assert_close("x", &actual, &exact, bound);
        catch_unwind(AssertUnwindSafe(check)).is_ok()
    };
    assert!(close([-f64::INFINITY, 65504., 6e4]));
    assert!(close([-f64::INFINITY, f64::INFINITY, 6e4]));
    assert!(!close([f64::INFINITY, 65504., 6e4]));
    assert!(!close([-65504., 65504., 6e4]));
    assert!(!close([-f64::INFINITY, 65504., f64::INFINITY]));
}
