//! γ/D of PowerNorm's evaluation, kept from one forward to the next.
//!
//! In an evaluation without gradients D is fixed, so PowerNorm is an RMSNorm with the weight γ/D. 1/D
//! takes a root and a division in f64 for each channel, which is several times as long as a single
//! row takes. But anyone may set the variables of ψ² and γ: an optimizer, a training step, a loaded
//! checkpoint. candle does not count such changes, so ψ² and γ are compared, bit by bit, with those
//! that the kept γ/D was computed from.

use super::layout::{channels, on_cpu, packed};
use super::step::{inverse_roots, output_gain};
use crate::device::pass::Affine;
use candle::{CpuStorage, DType, Device, Result, Tensor};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use pulp::bytemuck::cast_slice;
use std::sync::{Arc, Mutex, PoisonError};

/// The last γ/D of a layer, which its clones share.
#[derive(Default)]
pub(crate) struct Folded(Mutex<Option<Kept>>);

struct Kept {
    /// The bits of ψ² and γ.
    phi: Vec<u8>,
    weight: Vec<u8>,
    affine: Arc<Affine>,
}

impl Folded {
    /// γ/D in `dtype`, that of the sums, and β. ψ² and the weight are contiguous and on the CPU.
    pub fn affine(
        &self,
        phi: &Tensor,
        affine: Option<&Affine>,
        eps: f64,
        dtype: DType,
    ) -> Result<Arc<Affine>> {
        let weight = affine.map(|affine| &affine.weight);
        // A panic elsewhere leaves a gain with what it was computed from.
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kept) = &*kept
            && kept.affine.weight.dtype() == dtype
            && with_bytes(phi, |bytes| bytes == kept.phi)?
            && weight.map_or(Ok(true), |weight| {
                with_bytes(weight, |bytes| bytes == kept.weight)
            })?
        {
            return Ok(kept.affine.clone());
        }
        // Copies first: γ/D is of them, even if another thread sets the variables meanwhile.
        let copied = affine.map(|affine| -> Result<_> {
            let weight = affine.weight.detach().force_contiguous()?;
            let copied = Affine::new(weight, affine.bias.clone());
            Ok(copied.with_offset(affine.offset))
        });
        let (phi, affine) = (phi.detach().force_contiguous()?, copied.transpose()?);
        let gain = output_gain(affine.as_ref(), &inverse_roots(&channels(&phi)?, eps))?;
        let gain = Tensor::from_slice(&gain, gain.len(), &Device::Cpu)?.to_dtype(dtype)?;
        let bias = affine.as_ref().and_then(|affine| affine.bias.clone());
        let folded = Arc::new(Affine::new(gain, bias));
        *kept = Some(Kept {
            phi: with_bytes(&phi, <[u8]>::to_vec)?,
            weight: match &affine {
                Some(affine) => with_bytes(&affine.weight, <[u8]>::to_vec)?,
                None => vec![],
            },
            affine: folded.clone(),
        });
        Ok(folded)
    }
}

/// Calls `run` with the bytes of a contiguous tensor.
fn with_bytes<R>(tensor: &Tensor, run: impl FnOnce(&[u8]) -> R) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    let storage = on_cpu(&storage)?;
    Ok(match storage {
        CpuStorage::F64(_) => run(cast_slice(packed::<f64>(storage, layout)?)),
        CpuStorage::F16(_) => run(cast_slice(
            packed::<f16>(storage, layout)?.reinterpret_cast(),
        )),
        CpuStorage::BF16(_) => run(cast_slice(
            packed::<bf16>(storage, layout)?.reinterpret_cast(),
        )),
        _ => run(cast_slice(packed::<f32>(storage, layout)?)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle::Var;

    /// The gain of [ψ², γ] = [0.25, 3] is 6, that of [4, 3] is 1.5, and that of [4, 5] is 2.5.
    #[test]
    fn a_gain_is_kept_until_its_variables_move() -> Result<()> {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let var = |value: f32| {
                let value = Tensor::new(&[value], &Device::Cpu)?;
                Var::from_tensor(&value.to_dtype(dtype)?)
            };
            let (phi, weight) = (var(0.25)?, var(3.)?);
            let affine = Affine::new(weight.as_detached_tensor(), None);
            let folded = Folded::default();
            let gain = |dtype| -> Result<_> {
                let affine = folded.affine(&phi, Some(&affine), 0., dtype)?;
                Ok(affine.weight.clone())
            };
            let first = gain(DType::F32)?;
            assert_eq!(first.to_vec1::<f32>()?, [6.]);
            assert_eq!(gain(DType::F32)?.id(), first.id());
            phi.set(var(4.)?.as_tensor())?;
            assert_eq!(gain(DType::F32)?.to_vec1::<f32>()?, [1.5]);
            weight.set(var(5.)?.as_tensor())?;
            assert_eq!(gain(DType::F32)?.to_vec1::<f32>()?, [2.5]);
            assert_eq!(gain(DType::F64)?.to_vec1::<f64>()?, [2.5]);
        }
        Ok(())
    }
}
