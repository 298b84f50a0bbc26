//! The arithmetic of channels on a CPU.

use super::element::Accumulator;
use crate::device::channels::Channels;
use candle::{DType, Result, Tensor, Var, WithDType};

impl<A: Accumulator> Channels for Vec<A> {
    fn read(tensor: &Tensor, _like: &Self) -> Result<Self> {
        let tensor = tensor.detach().to_dtype(A::DTYPE)?;
        tensor.flatten_all()?.to_vec1()
    }

    fn read_nu(ema_gz: &Tensor, factors: [f64; 2], like: &Self) -> Result<Self> {
        let [first, second] = factors;
        let nu = ema_gz.detach().affine(first, 0.)?.affine(second, 0.)?;
        Self::read(&nu, like)
    }

    fn store(&self, var: &Var, guards: &[&Self]) -> Result<()> {
        // In f64, so that a channel that keeps its value keeps every bit of it.
        let mut values: Vec<f64> = self.iter().map(|&new| WithDType::to_f64(new)).collect();
        let is_finite = |value: A| match var.dtype() {
            DType::F64 => WithDType::to_f64(value).is_finite(),
            _ => (WithDType::to_f64(value) as f32).is_finite(),
        };
        let is_refused = |k: usize| guards.iter().any(|guard| !is_finite(guard[k]));
        if (0..values.len()).any(is_refused) {
            let old = var.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
            for (k, value) in values
                .iter_mut()
                .enumerate()
                .filter(|(k, _)| is_refused(*k))
            {
                *value = old[k];
            }
        }
        let values = Tensor::from_vec(values, var.shape(), var.device())?;
        var.set(&values.to_dtype(var.dtype())?)
    }

    fn to_tensor(&self, like: &Tensor) -> Result<Tensor> {
        let tensor = Tensor::from_slice(self, like.shape(), like.device())?;
        tensor.to_dtype(like.dtype())
    }

    fn to_numbers(&self) -> Result<Vec<f64>> {
        Ok(self
            .iter()
            .map(|&number| WithDType::to_f64(number))
            .collect())
    }

    fn of_numbers(numbers: &[f64], _like: &Self) -> Result<Self> {
        Ok(numbers.iter().map(|&number| A::from_f64(number)).collect())
    }

    fn plus(&self, other: &Self) -> Result<Self> {
        Ok(zip(self, other, |left, right| left + right))
    }

    fn times(&self, other: &Self) -> Result<Self> {
        Ok(zip(self, other, |left, right| left * right))
    }

    fn scaled(&self, factor: f64) -> Result<Self> {
        let factor = A::from_f64(factor);
        Ok(self.iter().map(|&value| factor * value).collect())
    }

    fn affine(&self, factor: f64, shift: f64) -> Result<Self> {
        let [factor, shift] = [factor, shift].map(A::from_f64);
        Ok(self.iter().map(|&value| factor * value + shift).collect())
    }

    fn mean(&self, rows: usize) -> Result<Self> {
        let rows = A::from_count(rows);
        Ok(self.iter().map(|&sum| sum / rows).collect())
    }

    fn inverse_root(&self, eps: f64) -> Result<Self> {
        let eps = A::from_f64(eps);
        let inverse_root = |&value: &A| (value + eps).sqrt().recip();
        Ok(self.iter().map(inverse_root).collect())
    }

    fn clamp_at_0(&self) -> Result<Self> {
        let clamp = |&value| if value < A::ZERO { A::ZERO } else { value };
        Ok(self.iter().map(clamp).collect())
    }
}

/// `f` of each pair of numbers.
pub(super) fn zip<A: Copy>(left: &[A], right: &[A], f: impl Fn(A, A) -> A) -> Vec<A> {
    left.iter().zip(right).map(|(&l, &r)| f(l, r)).collect()
}
