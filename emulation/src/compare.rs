//! What the CPU path makes of the same arguments, and how far the kernels may be from it.

use crate::data::{coarser, precision, tensor, to_f64};
use crate::pass::{bytes, Arguments, Results};
use candle::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use candle_powernorm::{power_norm, LossScale, Mode, Recipe, Statistics};
use std::collections::HashMap;

impl Arguments {
    /// The same passes on the CPU, with all gradients, in a layer whose builder is of this dtype.
    pub fn on_cpu(&self, builder: DType) -> Result<Results> {
        let mut varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, builder, &Device::Cpu);
        let mode = if self.train {
            Mode::train()
        } else {
            Mode::eval()
        };
        let (_, cols) = self.x.dims2()?;
        let layer = power_norm(cols, self.config, vb)?
            .with_mode(&mode)
            .with_loss_scale(&LossScale::new(self.loss_scale)?);
        let _guard = self.recalibrate.then(|| mode.recalibrate_scope());
        if let Some([weight, bias]) = &self.affine {
            varmap.set_one("weight", weight)?;
            varmap.set_one("bias", bias)?;
        }
        varmap.set_one("running_phi", &self.running_phi)?;
        varmap.set_one("ema_gz", &self.ema_gz)?;
        varmap.set_one("iters", Tensor::new(&[self.steps as i64], &Device::Cpu)?)?;

        let x = Var::from_tensor(&self.x)?;
        let (y, sum) = match (&self.residual, &self.keep) {
            (None, Some(keep)) => (layer.forward_masked(&x, keep)?, None),
            (None, None) => (layer.forward(&x)?, None),
            (Some(residual), keep) => {
                let (y, sum) = match keep {
                    Some(keep) => layer.forward_residual_masked(&x, residual, keep)?,
                    None => layer.forward_residual(&x, residual)?,
                };
                (y, Some(sum))
            }
        };
        let mut loss = (&y * &self.dy)?.sum_all()?;
        if let Some(sum) = &sum {
            loss = (loss + (sum * &self.dsum)?.sum_all()?)?;
        }
        let grads = loss.backward()?;
        let gradient = |of: &Tensor| grads.get(of).cloned();
        let var = |name: &str| varmap.data().lock().unwrap()[name].as_detached_tensor();
        Ok(Results {
            y: y.detach(),
            sum: sum.map(|sum| sum.detach()),
            dx: gradient(&x),
            dweight: layer.weight().and_then(gradient),
            dbias: layer.bias().and_then(gradient),
            running_phi: var("running_phi").copy()?,
            ema_gz: var("ema_gz").copy()?,
        })
    }

    /// Compares what the kernels gave, on each rank, with what the CPU path gave for all rows.
    #[track_caller]
    pub fn compare(&self, what: &str, of_ranks: &[Results], expected: &Results) -> Result<()> {
        let (actual, rounded) = joined(what, of_ranks)?;
        let terms = Terms::of(self);
        let (rows, cols) = self.x.dims2().unwrap();
        // A group of one channel has an input gradient near 0, and the exact gradient of a batch of one row
        // may be 0 too: all of it cancels.
        let dx_cancels = self.config.group_scaling == Some(cols) || terms.counted == 1;
        let sums = match self.x.dtype() {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        // ν is rounded to the state's dtype on its way into dx.
        let with_state = coarser(sums, self.ema_gz.dtype());
        let expected = expected.tensors();
        for (name, actual) in actual.tensors() {
            let (_, expected) = (expected.iter())
                .find(|(other, _)| *other == name)
                .expect("the CPU path computes all");
            let (terms, sums) = match name {
                "y" => (&terms.y, sums),
                // Rounded once, as on the CPU.
                "sum" => (&terms.sum, sums),
                "dx" => (&terms.dx, with_state),
                "dweight" => (&terms.dweight, sums),
                "dbias" => (&terms.dbias, sums),
                "running_phi" => (&terms.running_phi, sums),
                _ => (&terms.ema_gz, sums),
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
            let rounded = rounded.get(name);
            assert_close(&what, actual, expected, |k| {
                relative * terms[k] + rounded.map_or(0., |rounded| rounded[k])
            });
        }
        Ok(())
    }
}

/// The size of the terms that are added up to each element: rounding errors are proportional to it, where
/// terms cancel as anywhere else. Entries that are not finite count as 0.
struct Terms {
    /// Rows that enter the gradients' sums.
    counted: usize,
    y: Vec<f64>,
    sum: Vec<f64>,
    dx: Vec<f64>,
    dweight: Vec<f64>,
    dbias: Vec<f64>,
    running_phi: Vec<f64>,
    ema_gz: Vec<f64>,
}

impl Terms {
    fn of(arguments: &Arguments) -> Self {
        let Arguments { config, train, .. } = arguments;
        let (_, cols) = arguments.x.dims2().unwrap();
        let sum = (arguments.residual.as_ref()).map(|residual| (&arguments.x + residual).unwrap());
        let x = to_f64(sum.as_ref().unwrap_or(&arguments.x));
        let x: Vec<f64> = x.into_iter().map(finite).collect();
        let loss_scale = arguments.loss_scale;
        let dy: Vec<f64> = to_f64(&arguments.dy).into_iter().map(finite).collect();
        let rows = x.len() / cols;
        let keep = match &arguments.keep {
            Some(keep) => keep.to_vec1::<u8>().unwrap(),
            None => vec![1; rows],
        };
        let [weight, bias] = match &arguments.affine {
            Some(affine) => affine.each_ref().map(to_f64),
            None => [vec![1.; cols], vec![0.; cols]],
        };
        let phi = to_f64(&arguments.running_phi);
        let ema_gz = to_f64(&arguments.ema_gz);
        let paper = config.recipe == Recipe::Paper;
        let t = arguments.steps + 1;
        let by_batch = t <= config.warmup_steps
            || config.statistics == Statistics::Batch
            || arguments.recalibrate;

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
        let trained = (*train || arguments.recalibrate) && kept > 0;

        let mut terms = Self {
            counted,
            y: vec![0.; x.len()],
            sum: vec![0.; x.len()],
            dx: vec![0.; x.len()],
            dweight: vec![0.; cols],
            dbias: vec![0.; cols],
            running_phi: phi.clone(),
            ema_gz: ema_gz.iter().map(|ema| ema.abs()).collect(),
        };
        let mut dx_tilde = vec![0.; x.len()];
        for c in 0..cols {
            let batch_phi = column(c, &keeps, &|k| x_tilde(k).powi(2)) / kept as f64;
            let inv = |phi: f64| (phi + config.eps).sqrt().recip();
            let inv_rms = inv(if trained && by_batch {
                batch_phi
            } else {
                phi[c]
            });
            let divisor = if trained && !paper {
                inv(batch_phi)
            } else {
                inv_rms
            };
            // Terms of random sign add up to the root of their squares.
            let root_sum = |term: &dyn Fn(usize) -> f64| {
                let squares = column(c, &counts, &|k| term(k).powi(2));
                column(c, &counts, term).abs() + squares.sqrt()
            };
            terms.dweight[c] = root_sum(&|k| dy[k] * x[k] * factors[k / group_len] * inv_rms);
            terms.dbias[c] = root_sum(&|k| dy[k]);
            let lambda = (weight[c] * terms.dweight[c]).abs() / counted as f64;
            let beta = 1. - config.alpha_bwd;
            let nu = beta * ema_gz[c].abs() * loss_scale;
            let correction = match trained {
                true if by_batch && paper => lambda,
                true => nu,
                false => 0.,
            };
            if trained {
                let gamma =
                    column(c, &counts, &|k| (x_tilde(k) * inv_rms).powi(2)) / counted as f64;
                terms.running_phi[c] += batch_phi;
                terms.ema_gz[c] = (1. + beta * gamma) * ema_gz[c].abs() + lambda / loss_scale;
            }
            for row in 0..rows {
                let k = row * cols + c;
                let y = x_tilde(k) * inv_rms * weight[c].abs();
                terms.y[k] = y + bias[c].abs();
                if counts(row) {
                    let g = (weight[c] * dy[k]).abs();
                    dx_tilde[k] = (g + correction * x_tilde(k) * inv_rms) * divisor;
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

/// Checks `actual` against values that were rounded as it was: `|a−e| <= 2·u(out)·|e| + sums(k)`, where `sums`
/// is what the roundings before may add up to.
#[track_caller]
pub fn assert_close(what: &str, actual: &Tensor, expected: &Tensor, sums: impl Fn(usize) -> f64) {
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

/// What ranks give in all, and how much more the gradients of parameters may be off: each rank has rounded its part. All must
/// have the same state.
#[track_caller]
fn joined(what: &str, of_ranks: &[Results]) -> Result<(Results, HashMap<&'static str, Vec<f64>>)> {
    let [first, others @ ..] = of_ranks else {
        candle::bail!("no rank")
    };
    for other in others {
        for (name, of_first, of_other) in [
            ("running_phi", &first.running_phi, &other.running_phi),
            ("ema_gz", &first.ema_gz, &other.ema_gz),
        ] {
            let same = bytes(of_first)? == bytes(of_other)?;
            assert!(same, "{what}: {name} of ranks differs");
        }
    }
    let rows = |of: fn(&Results) -> Option<&Tensor>| -> Result<Option<Tensor>> {
        // candle does not join what is empty.
        let parts: Option<Vec<_>> = of_ranks.iter().map(of).collect();
        let Some(parts) = parts else { return Ok(None) };
        let parts: Vec<_> = (parts.into_iter())
            .filter(|part| part.elem_count() > 0)
            .collect();
        Tensor::cat(&parts, 0).map(Some)
    };
    let mut rounded = HashMap::new();
    let mut sum = |name, of: fn(&Results) -> Option<&Tensor>| -> Result<Option<Tensor>> {
        let Some(of_first) = of(first) else {
            return Ok(None);
        };
        if others.is_empty() {
            return Ok(Some(of_first.clone()));
        }
        let zeros = || vec![0.; of_first.elem_count()];
        let (mut sums, mut sizes) = (zeros(), zeros());
        for part in of_ranks.iter().filter_map(of) {
            for (k, value) in to_f64(part).into_iter().enumerate() {
                sums[k] += value;
                sizes[k] += precision(part.dtype()).0 * finite(value.abs());
            }
        }
        rounded.insert(name, sizes);
        Ok(Some(tensor(&sums, of_first.dims(), of_first.dtype())))
    };
    let results = Results {
        dweight: sum("dweight", |results| results.dweight.as_ref())?,
        dbias: sum("dbias", |results| results.dbias.as_ref())?,
        y: rows(|results| Some(&results.y))?.expect("there always is one"),
        sum: rows(|results| results.sum.as_ref())?,
        dx: rows(|results| results.dx.as_ref())?,
        running_phi: first.running_phi.clone(),
        ema_gz: first.ema_gz.clone(),
    };
    Ok((results, rounded))
}

fn finite(value: f64) -> f64 {
    if value.is_finite() {
        value
    } else {
        0.
    }
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let len = values.len() as f64;
    values.sum::<f64>() / len
}

impl Results {
    /// Checks that these are the bits of `other`.
    #[track_caller]
    pub fn assert_same_bits(&self, what: &str, other: &Self) -> Result<()> {
        for ((name, actual), (_, expected)) in self.tensors().into_iter().zip(other.tensors()) {
            let same = bytes(actual)? == bytes(expected)?;
            assert!(same, "{what}: {name} has other bits");
        }
        Ok(())
    }
}
