//! Relatives of batch normalization that the paper and its authors' talk compare with PowerNorm,
//! made of candle's operations. Each takes statistics of a channel over tokens, of a batch or of the
//! last batches.

use super::EPS;
use candle::backend::BackendStorage;
use candle::{CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape, Tensor, Var};
use candle_nn::{Init, VarBuilder};
use candle_powernorm::Mode;

/// Weight of the batch in the running statistics, candle's own for BatchNorm.
const MOMENTUM: f64 = 0.1;

/// The most that Batch Renormalization multiplies by, and the most that it adds. Its authors rise
/// to these over thousands of steps. Here they hold from the end of the warm-up on.
const LARGEST_RATIO: f64 = 3.;
const LARGEST_SHIFT: f64 = 5.;

/// Batches that MABN averages over.
const BATCHES: usize = 16;
/// The weight of each batch in its running statistic, and the most that it corrects by, as its
/// authors have them.
const MABN_MOMENTUM: f64 = 0.02;
const LARGEST_CORRECTION: f64 = 5.;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Batch Renormalization (Ioffe 2017): `x̂ = (x − μ_B)/σ_B · r + d` with `r = σ_B/σ` and
    /// `d = (μ_B − μ)/σ`, both clipped, and no gradient through them. During the warm-up r = 1 and
    /// d = 0.
    Renorm,
    /// Moving Average Batch Normalization (Yan et al. 2020), without the centred weights of the
    /// layers before it: `x̂ = x/χ · r` with χ² the mean of the last batches' quadratic means, and
    /// the gradient's Λ a mean of theirs. During the warm-up both are the batch's, and r = 1.
    ///
    /// The authors' code differs in two points that suit long runs. It holds r = 1 for 1000 steps
    /// at least, where this one corrects right after the warm-up. Its running statistic moves from
    /// 1, where this one starts with a cumulative mean.
    MovingAverage,
}

/// One such layer over the last dimension.
#[derive(Debug)]
pub struct Relative {
    kind: Kind,
    mode: Mode,
    weight: Tensor,
    bias: Tensor,
    warmup_steps: usize,
    /// By name, those that this kind keeps.
    buffers: Vec<(&'static str, Var)>,
}

impl Relative {
    pub fn new(
        size: usize,
        kind: Kind,
        warmup_steps: usize,
        mode: &Mode,
        vb: VarBuilder,
    ) -> Result<Self> {
        let buffers: &[(&str, usize, f64)] = match kind {
            Kind::Renorm => &[
                ("iters", 1, 0.),
                ("running_mean", size, 0.),
                ("running_var", size, 1.),
            ],
            Kind::MovingAverage => &[
                ("iters", 1, 0.),
                ("running_var", size, 1.),
                ("buffer_x2", BATCHES * size, 0.),
                ("buffer_gz", BATCHES * size, 0.),
            ],
        };
        let buffer = |&(name, length, value): &(&'static str, usize, f64)| {
            let tensor = vb.get_with_hints(length, name, Init::Const(value))?;
            // A builder on a VarMap gives the variable itself.
            Ok((name, Var::from_tensor(&tensor)?))
        };
        Ok(Self {
            kind,
            mode: mode.clone(),
            weight: vb.get_with_hints(size, "weight", Init::Const(1.))?,
            bias: vb.get_with_hints(size, "bias", Init::Const(0.))?,
            warmup_steps,
            buffers: buffers.iter().map(buffer).collect::<Result<_>>()?,
        })
    }

    /// Normalizes tokens, `[tokens, channels]`.
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let training = self.mode.is_training();
        let normalized = match self.kind {
            Kind::Renorm if training => self.renorm(xs)?,
            Kind::MovingAverage if training => self.moving_average(xs)?,
            Kind::Renorm => {
                let centred = xs.broadcast_sub(&self.value("running_mean")?)?;
                centred.broadcast_div(&deviation(&self.value("running_var")?)?)?
            }
            Kind::MovingAverage => xs.broadcast_div(&deviation(&self.value("running_var")?)?)?,
        };
        self.affine(&normalized)
    }

    fn affine(&self, normalized: &Tensor) -> Result<Tensor> {
        (normalized.broadcast_mul(&self.weight)?).broadcast_add(&self.bias)
    }

    fn renorm(&self, xs: &Tensor) -> Result<Tensor> {
        let (centred, spread, [batch_mean, batch_var]) = centre(xs)?;
        let (mean, var) = (self.buffer("running_mean")?, self.buffer("running_var")?);
        let running = deviation(&self.value("running_var")?)?;
        let normalized = centred.broadcast_div(&spread)?;
        let step = self.count()?;
        let normalized = match step > self.warmup_steps {
            false => normalized,
            true => {
                let ratio = deviation(&batch_var)?.div(&running)?;
                let ratio = ratio.clamp(1. / LARGEST_RATIO, LARGEST_RATIO)?;
                let shift = batch_mean
                    .sub(&self.value("running_mean")?)?
                    .div(&running)?;
                let shift = shift.clamp(-LARGEST_SHIFT, LARGEST_SHIFT)?;
                (normalized.broadcast_mul(&ratio)?).broadcast_add(&shift)?
            }
        };
        blend(mean, &batch_mean, MOMENTUM)?;
        blend(var, &batch_var, MOMENTUM)?;
        Ok(normalized)
    }

    fn moving_average(&self, xs: &Tensor) -> Result<Tensor> {
        let step = self.count()?;
        let slot = step % BATCHES;
        let square = xs.sqr()?.mean(0)?;
        let squares = self.buffer("buffer_x2")?;
        store(squares, slot, &square)?;
        let running = self.buffer("running_var")?;
        let averaged = step > self.warmup_steps.max(BATCHES);
        let square = match averaged {
            true => mean_of_slots(squares)?,
            false => square.detach(),
        };
        let normalized = xs.broadcast_div(&deviation(&square)?)?;
        let normalized = normalized.apply_op1(AveragedGradient {
            products: self.buffer("buffer_gz")?.clone(),
            slot,
            averaged,
        })?;
        let normalized = match averaged {
            true => {
                let ratio = deviation(&square)?.div(&deviation(&self.value("running_var")?)?)?;
                let ratio = ratio.clamp(1. / LARGEST_CORRECTION, LARGEST_CORRECTION)?;
                normalized.broadcast_mul(&ratio)?
            }
            false => normalized,
        };
        // A cumulative mean at first, for what it starts from is no statistic.
        blend(running, &square, MABN_MOMENTUM.max(1. / step as f64))?;
        Ok(normalized)
    }

    /// The buffer called `name`.
    fn buffer(&self, name: &str) -> Result<&Var> {
        let buffer = self.buffers.iter().find(|(other, _)| *other == name);
        buffer.map_or_else(|| candle::bail!("no {name}"), |(_, var)| Ok(var))
    }

    /// The value of the buffer called `name`. No gradient reaches it.
    fn value(&self, name: &str) -> Result<Tensor> {
        Ok(self.buffer(name)?.as_detached_tensor())
    }

    /// Counts a step of training, and gives its number, from 1.
    fn count(&self) -> Result<usize> {
        let iters = self.buffer("iters")?;
        iters.set(&(iters.as_detached_tensor() + 1.)?)?;
        let values = iters.to_dtype(candle::DType::F32)?.to_vec1::<f32>()?;
        Ok(values[0] as usize)
    }
}

/// The root of a mean square, with ε.
fn deviation(square: &Tensor) -> Result<Tensor> {
    (square + EPS)?.sqrt()
}

/// `xs` less its mean over tokens, its deviation, and its mean and variance without gradient.
fn centre(xs: &Tensor) -> Result<(Tensor, Tensor, [Tensor; 2])> {
    let mean = xs.mean_keepdim(0)?;
    let centred = xs.broadcast_sub(&mean)?;
    let var = centred.sqr()?.mean_keepdim(0)?;
    let numbers = [mean.squeeze(0)?.detach(), var.squeeze(0)?.detach()];
    Ok((centred, deviation(&var)?, numbers))
}

fn blend(running: &Var, batch: &Tensor, share: f64) -> Result<()> {
    let old = (running.as_detached_tensor() * (1. - share))?;
    running.set(&(old + (batch.detach() * share)?)?)
}

/// Puts the numbers of a batch into one of the [`BATCHES`] slots of a buffer.
fn store(buffer: &Var, slot: usize, values: &Tensor) -> Result<()> {
    let size = values.elem_count();
    let slots = buffer.as_detached_tensor().reshape((BATCHES, size))?;
    let values = values.detach().reshape((1, size))?;
    buffer.set(
        &slots
            .slice_assign(&[slot..slot + 1, 0..size], &values)?
            .flatten_all()?,
    )
}

fn mean_of_slots(buffer: &Var) -> Result<Tensor> {
    let size = buffer.elem_count() / BATCHES;
    (buffer.as_detached_tensor().reshape((BATCHES, size))?).mean(0)
}

/// The identity on `z = x/χ`, whose backward turns the gradient g into `g − Λ ⊙ z`. Λ is the mean
/// of `g ⊙ z` over the tokens of the last batches, or of this batch only.
struct AveragedGradient {
    products: Var,
    slot: usize,
    averaged: bool,
}

impl CustomOp1 for AveragedGradient {
    fn name(&self) -> &'static str {
        "averaged-gradient"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((whole(storage, layout)?, layout.shape().clone()))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((whole(storage, layout)?, layout.shape().clone()))
    }

    fn bwd(&self, z: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let product = (gradient * z)?.mean(0)?;
        store(&self.products, self.slot, &product)?;
        let lambda = match self.averaged {
            true => mean_of_slots(&self.products)?,
            false => product,
        };
        Ok(Some((gradient - z.broadcast_mul(&lambda)?)?))
    }
}

/// A copy of what a division has just written.
fn whole<S: BackendStorage>(storage: &S, layout: &Layout) -> Result<S> {
    if !layout.is_contiguous() || layout.start_offset() != 0 {
        candle::bail!("a view, where a result was expected")
    }
    storage.try_clone(layout)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle::{DType, Device};
    use candle_nn::VarMap;

    const SIZE: usize = 3;
    const ROWS: usize = 5;

    fn layer(kind: Kind, warmup_steps: usize) -> Result<(Relative, Mode)> {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F64, &Device::Cpu);
        let mode = Mode::train();
        Ok((Relative::new(SIZE, kind, warmup_steps, &mode, vb)?, mode))
    }

    /// The tokens of a step and their upstream gradient, from sines.
    fn batch(step: usize) -> Result<[Var; 2]> {
        let values = |shift: f64| {
            let values = (0..ROWS * SIZE).map(|i| 1.5 * (i as f64 * 0.7 + shift).sin() + 0.3);
            Var::from_vec(values.collect(), (ROWS, SIZE), &Device::Cpu)
        };
        Ok([values(step as f64)?, values(2. + 3. * step as f64)?])
    }

    /// The output and the gradient of the input.
    fn pass(layer: &Relative, [xs, dy]: &[Var; 2]) -> Result<[Vec<f64>; 2]> {
        let ys = layer.forward(xs)?;
        let store = (&ys * dy.as_tensor())?.sum_all()?.backward()?;
        for (name, var) in &layer.buffers {
            assert!(store.get(var).is_none(), "{name} has a gradient");
        }
        let dx = store.get(xs).unwrap();
        Ok([numbers(&ys)?, numbers(dx)?])
    }

    fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
        tensor.flatten_all()?.to_vec1()
    }

    fn column(values: &[f64], c: usize) -> Vec<f64> {
        values.iter().skip(c).step_by(SIZE).copied().collect()
    }

    fn mean(values: impl Iterator<Item = f64>) -> f64 {
        values.sum::<f64>() / ROWS as f64
    }

    #[track_caller]
    fn assert_close(ours: &[f64], theirs: &[f64], what: &str) {
        assert_eq!(ours.len(), theirs.len());
        for (ours, theirs) in ours.iter().zip(theirs) {
            // Sums of a few terms near 1, over at most dozens of steps.
            assert!((ours - theirs).abs() < 1e-12, "{what}: {ours} and {theirs}");
        }
    }

    /// Ioffe's equations by hand, and in evaluation the running statistics.
    #[test]
    fn renorm_follows_its_equations() -> Result<()> {
        let (layer, mode) = layer(Kind::Renorm, 2)?;
        let (mut running_mean, mut running_var) = ([0.; SIZE], [1.; SIZE]);
        for step in 1..8 {
            let [xs, dy] = batch(step)?;
            // Far from what runs, so that the clips act: one step high, one spread out.
            let xs = match step {
                4 => Var::from_tensor(&(xs.as_tensor() + 20.)?)?,
                5 => Var::from_tensor(&(xs.as_tensor() * 30.)?)?,
                _ => xs,
            };
            let [ys, dx] = pass(&layer, &[xs.clone(), dy.clone()])?;
            let (x, dy) = (numbers(&xs)?, numbers(&dy)?);
            for c in 0..SIZE {
                let [x, dy, ys, dx] = [&x, &dy, &ys, &dx].map(|values| column(values, c));
                let mu = mean(x.iter().copied());
                let var = mean(x.iter().map(|x| (x - mu).powi(2)));
                let (sigma, running) = ((var + EPS).sqrt(), (running_var[c] + EPS).sqrt());
                let (r, d) = match step > 2 {
                    true => (
                        (sigma / running).clamp(1. / 3., 3.),
                        ((mu - running_mean[c]) / running).clamp(-5., 5.),
                    ),
                    false => (1., 0.),
                };
                match step {
                    4 => assert_eq!(d, 5.),
                    5 => assert_eq!(r, 3.),
                    _ => {}
                }
                let x_hat: Vec<f64> = x.iter().map(|x| (x - mu) / sigma).collect();
                let expected: Vec<f64> = x_hat.iter().map(|x_hat| x_hat * r + d).collect();
                assert_close(&ys, &expected, "y");
                let along = mean(dy.iter().zip(&x_hat).map(|(g, x_hat)| g * x_hat));
                let level = mean(dy.iter().copied());
                let gradient = |(g, x_hat): (&f64, &f64)| r / sigma * (g - level - along * x_hat);
                let expected: Vec<f64> = dy.iter().zip(&x_hat).map(gradient).collect();
                assert_close(&dx, &expected, "dx");
                running_mean[c] += 0.1 * (mu - running_mean[c]);
                running_var[c] += 0.1 * (var - running_var[c]);
            }
        }
        mode.set_training(false);
        let [xs, _] = batch(9)?;
        let expected: Vec<f64> = (numbers(&xs)?.iter().enumerate())
            .map(|(i, x)| (x - running_mean[i % SIZE]) / (running_var[i % SIZE] + EPS).sqrt())
            .collect();
        assert_close(&numbers(&layer.forward(&xs)?)?, &expected, "evaluation");
        Ok(())
    }

    /// The equations of [`Kind::MovingAverage`] by hand, over more batches than are averaged. The
    /// warm-up takes fewer batches, and then more.
    #[test]
    fn mabn_averages_the_last_batches_in_both_directions() -> Result<()> {
        for warmup_steps in [3, BATCHES + 4] {
            mabn_averages(warmup_steps)?;
        }
        Ok(())
    }

    fn mabn_averages(warmup_steps: usize) -> Result<()> {
        let (layer, mode) = layer(Kind::MovingAverage, warmup_steps)?;
        let mut squares = vec![[0.; SIZE]; BATCHES];
        let mut products = squares.clone();
        let mut running = [0.; SIZE];
        for step in 1..3 * BATCHES {
            let batch = batch(step)?;
            let [ys, dx] = pass(&layer, &batch)?;
            let [x, dy] = [numbers(&batch[0])?, numbers(&batch[1])?];
            let averaged = step > warmup_steps.max(BATCHES);
            for c in 0..SIZE {
                let [x, dy, ys, dx] = [&x, &dy, &ys, &dx].map(|values| column(values, c));
                let over_slots = |slots: &[[f64; SIZE]]| {
                    slots.iter().map(|slot| slot[c]).sum::<f64>() / BATCHES as f64
                };
                let own = mean(x.iter().map(|x| x * x));
                squares[step % BATCHES][c] = own;
                let square = if averaged { over_slots(&squares) } else { own };
                let chi = (square + EPS).sqrt();
                let r = match averaged {
                    true => (chi / (running[c] + EPS).sqrt()).clamp(0.2, 5.),
                    false => 1.,
                };
                let z: Vec<f64> = x.iter().map(|x| x / chi).collect();
                let expected: Vec<f64> = z.iter().map(|z| r * z).collect();
                assert_close(&ys, &expected, "y");
                let own = mean(dy.iter().zip(&z).map(|(dy, z)| r * dy * z));
                products[step % BATCHES][c] = own;
                let lambda = if averaged { over_slots(&products) } else { own };
                let gradient = |(dy, z): (&f64, &f64)| (r * dy - lambda * z) / chi;
                let expected: Vec<f64> = dy.iter().zip(&z).map(gradient).collect();
                assert_close(&dx, &expected, "dx");
                running[c] += (1. / step as f64).max(0.02) * (square - running[c]);
            }
        }
        mode.set_training(false);
        let [xs, _] = batch(99)?;
        let expected: Vec<f64> = (numbers(&xs)?.iter().enumerate())
            .map(|(i, x)| x / (running[i % SIZE] + EPS).sqrt())
            .collect();
        assert_close(&numbers(&layer.forward(&xs)?)?, &expected, "evaluation");
        Ok(())
    }
}
