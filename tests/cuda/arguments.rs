//! A forward of a layer and perhaps its backward, as data: a device runs it, on one rank or on
//! several, and is compared with the CPU path on all rows.

use crate::common::distributed::{Rank, on_ranks};
use crate::common::gpu::{gpu, gpu_of_one_stream};
use crate::common::*;
use candle::{DType, Device, Result, Tensor, Var};
use candle_nn::VarBuilder;
use candle_powernorm::{LossScale, Mode, PowerNormConfig, Ranks, Recipe, Statistics, power_norm};
use std::collections::HashMap;
use std::ops::Range;

/// All that the passes read. Tensors are packed, on the CPU.
#[derive(Clone)]
pub struct Arguments {
    /// The layer's.
    pub config: PowerNormConfig,
    /// Training steps taken before.
    pub steps: usize,
    /// The purpose of the forward.
    pub purpose: Purpose,
    /// The factor of the loss.
    pub loss_scale: f64,
    /// `[rows, cols]`.
    pub x: Tensor,
    /// As `x`: added to it first.
    pub residual: Option<Tensor>,
    /// As `x`: the gradient of the output.
    pub dy: Tensor,
    /// As `x`: the gradient of the sum with the residual.
    pub dsum: Tensor,
    /// `[rows]`, u8.
    pub keep: Option<Tensor>,
    /// γ, `[cols]`.
    pub weight: Option<Tensor>,
    /// β, `[cols]`.
    pub bias: Option<Tensor>,
    /// ψ², `[cols]`.
    pub running_phi: Tensor,
    /// ν/(1−α_b), `[cols]`.
    pub ema_gz: Tensor,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Training,
    Evaluation,
    /// The first batch of one.
    Recalibration,
}

/// The gradients to compute. The backward does not run where none is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// ∂L/∂X.
    pub input: bool,
    /// ∂L/∂γ.
    pub weight: bool,
    /// ∂L/∂β.
    pub bias: bool,
}

impl Wanted {
    pub const ALL: Self = Self {
        input: true,
        weight: true,
        bias: true,
    };

    fn any(&self) -> bool {
        self.input || self.weight || self.bias
    }
}

/// The offset of mask and parameters in their storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offsets {
    AtTheStart,
    AnElementIn,
}

/// The results of the passes by name, on the CPU: of each element `y`, `dx` and `sum`, which is the
/// sum with the residual, and of each channel `dweight`, `dbias`, ψ² and ν. What was not wanted is
/// not there.
pub struct Results(Vec<(&'static str, Tensor)>);

impl Arguments {
    /// A training step on random rows, in the middle of the running phase, without a mask.
    pub fn random(
        data: &mut Data,
        config: PowerNormConfig,
        rows: usize,
        input: DType,
        builder: DType,
        cols: usize,
    ) -> Self {
        let state = sums_of(builder);
        // Channels differ in scale, so that a mix-up shows.
        let scales = data.uniform(cols, 0.5, 2.);
        let x = (data.normal(rows * cols).iter().zip(scales.iter().cycle()))
            .map(|(x, scale)| x * scale)
            .collect::<Vec<_>>();
        let weight = data.weight(cols);
        // In some channels so small that ν's factor would be negative, and is clamped.
        let mut phi = data.uniform(cols, 0.5, 2.);
        for phi in phi.iter_mut().skip(2).step_by(7) {
            *phi *= 0.02;
        }
        let bias = data.normal(cols);
        let parameter = |values: &[f64]| tensor(values, &[cols], builder);
        Self {
            config,
            steps: config.warmup_steps + 3,
            purpose: Purpose::Training,
            loss_scale: 1.,
            residual: None,
            x: tensor(&x, &[rows, cols], input),
            dy: tensor(&data.normal(rows * cols), &[rows, cols], input),
            dsum: tensor(&data.normal(rows * cols), &[rows, cols], input),
            keep: None,
            weight: config.affine.then(|| parameter(&weight)),
            bias: (config.affine && config.bias).then(|| parameter(&bias)),
            running_phi: tensor(&phi, &[cols], state),
            ema_gz: tensor(&data.normal(cols), &[cols], state),
        }
    }

    /// The rows of a rank, of ranks that share them out by weight.
    pub fn rows_of(&self, weights: &[usize], rank: usize) -> Range<usize> {
        let rows = self.x.dims()[0];
        let total: usize = weights.iter().sum();
        let before = |rank: usize| rows * weights[..rank].iter().sum::<usize>() / total;
        before(rank)..before(rank + 1)
    }

    /// The arguments of such a rank.
    fn shard(&self, weights: &[usize], rank: usize) -> Result<Self> {
        let rows = self.rows_of(weights, rank);
        let part = |t: &Tensor| t.narrow(0, rows.start, rows.len())?.force_contiguous();
        Ok(Self {
            x: part(&self.x)?,
            residual: self.residual.as_ref().map(part).transpose()?,
            dy: part(&self.dy)?,
            dsum: part(&self.dsum)?,
            keep: self.keep.as_ref().map(part).transpose()?,
            ..self.clone()
        })
    }

    /// Runs the passes in a layer on `device` whose builder is of this dtype.
    fn run(
        &self,
        device: &Device,
        builder: DType,
        wanted: Wanted,
        offsets: Offsets,
        ranks: Option<&Ranks>,
    ) -> Result<Results> {
        let to = |tensor: &Tensor| match tensor.elem_count() {
            // Nothing is copied.
            0 => Tensor::zeros(tensor.shape(), tensor.dtype(), device),
            _ => tensor.to_device(device),
        };
        // The storage, and the part of it that the layer takes.
        let placed = |tensor: &Tensor, wanted: bool| -> Result<(Tensor, Tensor)> {
            let len = tensor.elem_count();
            let shifted = offsets == Offsets::AnElementIn && len > 0;
            let whole = match shifted {
                true => to(&Tensor::cat(&[&tensor.narrow(0, 0, 1)?, tensor], 0)?)?,
                false => to(tensor)?,
            };
            let whole = match wanted {
                true => Var::from_tensor(&whole)?.as_tensor().clone(),
                false => whole,
            };
            let part = match shifted {
                true => whole.narrow(0, 1, len)?,
                false => whole.clone(),
            };
            Ok((whole, part))
        };
        let mut tensors = HashMap::from([
            ("running_phi".to_owned(), to(&self.running_phi)?),
            ("ema_gz".to_owned(), to(&self.ema_gz)?),
            ("iters".to_owned(), Tensor::new(&[self.steps as i64], &CPU)?),
        ]);
        // The storage of what gets a gradient.
        let mut stored = vec![];
        for (name, of, tensor, wanted) in [
            ("weight", "dweight", &self.weight, wanted.weight),
            ("bias", "dbias", &self.bias, wanted.bias),
        ] {
            if let Some(tensor) = tensor {
                let (whole, part) = placed(tensor, wanted)?;
                tensors.insert(name.to_owned(), part);
                stored.extend(wanted.then_some((of, whole)));
            }
        }
        let mode = match self.purpose {
            Purpose::Training => Mode::train(),
            Purpose::Evaluation | Purpose::Recalibration => Mode::eval(),
        };
        let recalibrates = self.purpose == Purpose::Recalibration;
        let _recalibrates = recalibrates.then(|| mode.recalibrate_scope());
        let (_, cols) = self.x.dims2()?;
        let vb = VarBuilder::from_tensors(tensors, builder, device);
        let mut layer = power_norm(cols, self.config, vb)?
            .with_unsaved_statistics()
            .with_mode(&mode)
            .with_loss_scale(&LossScale::new(self.loss_scale)?);
        if let Some(ranks) = ranks {
            layer = layer.with_ranks(ranks);
        }

        let keep = self.keep.as_ref().map(|keep| placed(keep, false));
        let keep = keep.transpose()?.map(|(_, part)| part);
        let x = match (wanted.input, self.x.elem_count()) {
            (true, 0) => Var::zeros(self.x.shape(), self.x.dtype(), device)?.into_inner(),
            (true, _) => Var::from_tensor(&to(&self.x)?)?.into_inner(),
            (false, _) => to(&self.x)?,
        };
        let residual = self.residual.as_ref().map(to).transpose()?;
        let outputs = outputs(&layer, &x, residual.as_ref(), keep.as_ref())?;
        let (y, sum) = &outputs;
        let to_host = |tensor: &Tensor| match tensor.elem_count() {
            0 => Tensor::zeros(tensor.shape(), tensor.dtype(), &CPU),
            _ => tensor.detach().to_device(&CPU),
        };
        let mut results = vec![("y", to_host(y)?)];
        if let Some(sum) = sum {
            results.push(("sum", to_host(sum)?));
        }
        if wanted.any() {
            let grads = loss_of(&outputs, &to(&self.dy)?, &to(&self.dsum)?)?.backward()?;
            if let Some(dx) = grads.get(&x).filter(|_| wanted.input) {
                results.push(("dx", to_host(dx)?));
            }
            for (name, whole) in stored {
                if let Some(gradient) = grads.get(&whole) {
                    let part = gradient.narrow(0, gradient.elem_count() - cols, cols)?;
                    results.push((name, to_host(&part.force_contiguous()?)?));
                }
            }
        }
        results.push(("ψ²", to_host(&layer.running_phi()?)?));
        results.push(("ν", to_host(&layer.nu()?)?));
        Ok(Results(results))
    }

    /// [`run`](Self::run), on ranks that share the rows out by weight. One rank is alone.
    fn run_over(
        &self,
        device: fn() -> Device,
        builder: DType,
        wanted: Wanted,
        offsets: Offsets,
        weights: &[usize],
    ) -> Result<Vec<Results>> {
        if weights.len() == 1 {
            return Ok(vec![self.run(&device(), builder, wanted, offsets, None)?]);
        }
        let run = |rank: &Rank| {
            let share = self.shard(weights, rank.rank)?;
            share.run(&rank.device, builder, wanted, offsets, Some(&rank.over))
        };
        on_ranks(weights.len(), device, run).into_iter().collect()
    }

    /// Runs the passes on a GPU, compares them with the CPU path's for all rows, and, `twice`, runs
    /// them on another stream to the same bits. Gives the results of each rank.
    #[track_caller]
    pub fn check(
        &self,
        what: &str,
        builder: DType,
        wanted: Wanted,
        offsets: Offsets,
        weights: &[usize],
        twice: bool,
    ) -> Result<Vec<Results>> {
        let mut expected = self.run(&CPU, builder, Wanted::ALL, Offsets::AtTheStart, None)?;
        if let (false, Some((_, nu))) = (wanted.any(), expected.0.last_mut()) {
            // The CPU path's backward has run here. On the GPU none does, so ν stays.
            *nu = self.ema_gz.affine(1. - self.config.alpha_bwd, 0.)?;
        }
        let of_ranks = self.run_over(gpu, builder, wanted, offsets, weights)?;
        self.compare(what, &of_ranks, &expected)?;
        if twice {
            let again = self.run_over(gpu_of_one_stream, builder, wanted, offsets, weights)?;
            for (results, again) in of_ranks.iter().zip(&again) {
                results.assert_same_bits(&format!("{what}, on another stream"), again);
            }
        }
        Ok(of_ranks)
    }

    /// `true` if the batch's own statistic normalizes, if this trains.
    fn by_batch(&self) -> bool {
        self.steps < self.config.warmup_steps
            || self.config.statistics == Statistics::Batch
            || self.purpose == Purpose::Recalibration
    }

    /// Compares what each rank gave with what the CPU path gave for all rows.
    #[track_caller]
    fn compare(&self, what: &str, of_ranks: &[Results], expected: &Results) -> Result<()> {
        let terms = Terms::of(self);
        let (rows, cols) = self.x.dims2()?;
        // A group of one channel has an input gradient near 0, and the exact gradient of a batch of
        // one row may be 0 too: all of it cancels.
        let dx_cancels = self.config.group_scaling == Some(cols) || terms.counted == 1;
        let sums = sums_of(self.x.dtype());
        // ν is rounded to the state's dtype on its way into dx.
        let with_state = coarser(sums, self.ema_gz.dtype());
        for (name, actual, rounded) in joined(what, of_ranks)? {
            let expected = expected.get(name).expect("the CPU path computes all");
            let (terms, sums) = match name {
                "y" => (&terms.y, sums),
                // Rounded once, as on the CPU.
                "sum" => (&terms.sum, sums),
                "dx" => (&terms.dx, with_state),
                "dweight" => (&terms.dweight, sums),
                "dbias" => (&terms.dbias, sums),
                "ψ²" => (&terms.running_phi, sums),
                _ => (&terms.nu, sums),
            };
            let what = format!("{what}: {name}");
            let trivial = to_f64(expected).iter().all(|&e| e == 0.);
            let must_be = terms.iter().all(|&term| term == 0.);
            assert!(
                !trivial || must_be || name == "dx" && dx_cancels,
                "{what}: nothing but zeros expected"
            );
            let n = (rows + cols) as f64;
            let relative = 16. * n.sqrt() * precision(sums).0;
            let bound = |k: usize| relative * terms[k] + rounded.get(k).unwrap_or(&0.);
            assert_near(&what, &actual, expected, bound);
        }
        Ok(())
    }
}

impl Results {
    fn get(&self, name: &str) -> Option<&Tensor> {
        let (_, tensor) = self.0.iter().find(|(own, _)| *own == name)?;
        Some(tensor)
    }

    #[track_caller]
    pub fn assert_same_bits(&self, what: &str, other: &Self) {
        assert_eq!(self.0.len(), other.0.len(), "{what}: results");
        for ((name, ours), (other, theirs)) in self.0.iter().zip(&other.0) {
            assert_eq!(name, other, "{what}");
            if ours.elem_count() > 0 {
                assert_same_bits(&format!("{what}: {name}"), ours, theirs);
            }
        }
    }
}

/// The size of the terms that are added up to each element: rounding errors are proportional to it,
/// where terms cancel as anywhere else. Entries that are not finite count as 0.
struct Terms {
    /// Rows that enter the gradients' sums.
    counted: usize,
    y: Vec<f64>,
    sum: Vec<f64>,
    dx: Vec<f64>,
    dweight: Vec<f64>,
    dbias: Vec<f64>,
    running_phi: Vec<f64>,
    nu: Vec<f64>,
}

impl Terms {
    fn of(arguments: &Arguments) -> Self {
        let config = &arguments.config;
        let (_, cols) = arguments.x.dims2().unwrap();
        let with_residual = |residual| add_rounded(&arguments.x, residual).unwrap();
        let sum = arguments.residual.as_ref().map(with_residual);
        let x = to_f64(sum.as_ref().unwrap_or(&arguments.x));
        let x: Vec<f64> = x.into_iter().map(finite).collect();
        let loss_scale = arguments.loss_scale;
        let dy: Vec<f64> = to_f64(&arguments.dy).into_iter().map(finite).collect();
        let rows = x.len() / cols;
        let keep = match &arguments.keep {
            Some(keep) => keep.to_vec1::<u8>().unwrap(),
            None => vec![1; rows],
        };
        let parameter = |values: &Option<Tensor>, absent: f64| {
            values.as_ref().map_or(vec![absent; cols], to_f64)
        };
        let weight = parameter(&arguments.weight, 1.);
        let bias = parameter(&arguments.bias, 0.);
        let phi = to_f64(&arguments.running_phi);
        let ema_gz = to_f64(&arguments.ema_gz);
        let beta = 1. - config.alpha_bwd;
        let paper = config.recipe == Recipe::Paper;
        let by_batch = arguments.by_batch();

        let group_len = cols / config.group_scaling.unwrap_or(cols);
        let scaled = config.group_scaling.is_some();
        let factors: Vec<f64> = x
            .chunks(group_len)
            .map(|group| {
                // Over their largest, so that no square overflows.
                let largest = group.iter().fold(1., |max: f64, x| max.max(x.abs()));
                let squares = group.iter().map(|x| (x / largest).powi(2));
                let mean_square = mean(squares) + config.eps / largest / largest;
                match scaled {
                    true => (largest * mean_square.sqrt()).recip(),
                    false => 1.,
                }
            })
            .collect();
        let x_tilde = |k: usize| (x[k] * factors[k / group_len]).abs();
        let column = |c: usize, counted: &dyn Fn(usize) -> bool, term: &dyn Fn(usize) -> f64| {
            let rows = (0..rows).filter(|&row| counted(row));
            rows.map(|row| term(row * cols + c)).sum::<f64>()
        };
        let keeps = |row: usize| keep[row] != 0;
        let counts = |row: usize| keeps(row) || !paper;
        let kept = (0..rows).filter(|&row| keeps(row)).count();
        let counted = (0..rows).filter(|&row| counts(row)).count();
        let trained = arguments.purpose != Purpose::Evaluation && kept > 0;

        let mut terms = Self {
            counted,
            y: vec![0.; x.len()],
            sum: vec![0.; x.len()],
            dx: vec![0.; x.len()],
            dweight: vec![0.; cols],
            dbias: vec![0.; cols],
            running_phi: phi.clone(),
            nu: ema_gz.iter().map(|ema| beta * ema.abs()).collect(),
        };
        let mut dx_tilde = vec![0.; x.len()];
        for c in 0..cols {
            let batch_phi = column(c, &keeps, &|k| x_tilde(k).powi(2)) / kept as f64;
            let inv = |phi: f64| (phi + config.eps).sqrt().recip();
            let inv_d = inv(match trained && by_batch {
                true => batch_phi,
                false => phi[c],
            });
            let divisor = match trained && !paper {
                true => inv(batch_phi),
                false => inv_d,
            };
            // Terms of random sign add up to the root of their squares.
            let root_sum = |term: &dyn Fn(usize) -> f64| {
                let squares = column(c, &counts, &|k| term(k).powi(2));
                column(c, &counts, term).abs() + squares.sqrt()
            };
            terms.dweight[c] = root_sum(&|k| dy[k] * x[k] * factors[k / group_len] * inv_d);
            terms.dbias[c] = root_sum(&|k| dy[k]);
            let lambda = (weight[c] * terms.dweight[c]).abs() / counted as f64;
            let nu = beta * ema_gz[c].abs() * loss_scale;
            let correction = match trained {
                true if by_batch && paper => lambda,
                true => nu,
                false => 0.,
            };
            if trained {
                let gamma = column(c, &counts, &|k| (x_tilde(k) * inv_d).powi(2)) / counted as f64;
                terms.running_phi[c] += batch_phi;
                let step = (1. + beta * gamma) * ema_gz[c].abs() + lambda / loss_scale;
                terms.nu[c] = beta * step;
            }
            for row in 0..rows {
                let k = row * cols + c;
                let y = x_tilde(k) * inv_d * weight[c].abs();
                terms.y[k] = y + bias[c].abs();
                if counts(row) {
                    let g = (weight[c] * dy[k]).abs();
                    dx_tilde[k] = (g + correction * x_tilde(k) * inv_d) * divisor;
                }
            }
        }
        for (group, &factor) in factors.iter().enumerate() {
            let range = group * group_len..(group + 1) * group_len;
            let dot = match scaled {
                true => mean(range.clone().map(|k| dx_tilde[k] * x_tilde(k))),
                false => 0.,
            };
            for k in range {
                terms.dx[k] = factor * (dx_tilde[k] + x_tilde(k) * dot);
            }
        }
        if sum.is_some() {
            let dsum = to_f64(&arguments.dsum);
            for (dx, dsum) in terms.dx.iter_mut().zip(dsum) {
                *dx += dsum.abs();
            }
        }
        terms
    }
}

/// Checks `actual` against values that were rounded as it was: `|a−e| <= 2·u(out)·|e| + sums(k)`,
/// where `sums` is what the roundings before may add up to.
#[track_caller]
pub fn assert_near(what: &str, actual: &Tensor, expected: &Tensor, sums: impl Fn(usize) -> f64) {
    assert_eq!(actual.dtype(), expected.dtype(), "{what}: dtype");
    assert_eq!(actual.dims(), expected.dims(), "{what}: shape");
    let (u_out, min_normal) = precision(expected.dtype());
    let (actual, expected) = (to_f64(actual), to_f64(expected));
    for (k, (&actual, &expected)) in actual.iter().zip(&expected).enumerate() {
        let bound = 2. * u_out * expected.abs().max(min_normal) + sums(k);
        let same = actual == expected || actual.is_nan() && expected.is_nan();
        assert!(
            same || (actual - expected).abs() <= bound,
            "{what}[{k}]: got {actual:e}, expected {expected:e}, {} times the bound",
            (actual - expected).abs() / bound
        );
    }
}

/// The ranks' results joined, and how much more the elements of a parameter's gradient may be off:
/// each rank has rounded its part. All must have the same state.
#[track_caller]
fn joined(what: &str, of_ranks: &[Results]) -> Result<Vec<(&'static str, Tensor, Vec<f64>)>> {
    let mut all = vec![];
    for (name, first) in &of_ranks[0].0 {
        let parts = of_ranks.iter().filter_map(|results| results.get(name));
        let parts: Vec<_> = parts.collect();
        let (mut joined, mut rounded) = (first.clone(), vec![]);
        match *name {
            "ψ²" | "ν" => {
                for part in parts {
                    assert_same_bits(&format!("{what}: {name} of ranks"), part, first);
                }
            }
            "dweight" | "dbias" if of_ranks.len() == 1 => {}
            "dweight" | "dbias" => {
                let mut sums = vec![0.; first.elem_count()];
                rounded = sums.clone();
                for part in parts {
                    let u = precision(part.dtype()).0;
                    for (k, value) in to_f64(part).into_iter().enumerate() {
                        sums[k] += value;
                        rounded[k] += u * finite(value.abs());
                    }
                }
                joined = tensor(&sums, first.dims(), first.dtype());
            }
            _ if parts.len() < of_ranks.len() => continue,
            _ => {
                // candle does not join what is empty.
                let parts = parts.into_iter().filter(|part| part.elem_count() > 0);
                joined = Tensor::cat(&parts.collect::<Vec<_>>(), 0)?;
            }
        }
        all.push((*name, joined, rounded));
    }
    Ok(all)
}

fn finite(value: f64) -> f64 {
    match value.is_finite() {
        true => value,
        false => 0.,
    }
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let len = values.len() as f64;
    values.sum::<f64>() / len
}
