//! What layers and functions check of their arguments.

use candle::{DType, Device, Result, Storage, Tensor};
use std::num::NonZero;
use std::ptr::NonNull;

/// Checks that `name` is on the device of a layer, `own`.
#[inline]
pub(crate) fn check_device(layer: &str, name: &str, device: &Device, own: &Device) -> Result<()> {
    if let (Device::Cpu, Device::Cpu) = (device, own) {
        return Ok(());
    }
    // candle's `Device::same_device` would not do: it calls two handles of one GPU two devices.
    let (expected, got) = (own.location(), device.location());
    if got != expected {
        candle::bail!(
            "{layer}: expected {name} on the layer's device {expected:?}, got {got:?}: \
             move it by `to_device`"
        )
    }
    Ok(())
}

/// `true` if devices compute rows of this dtype.
pub(crate) fn is_computed(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16)
}

/// Identifies the storage that a tensor is a view of, as long as there is such a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StorageId(NonZero<usize>);

impl StorageId {
    /// candle tells storages apart only while they are locked.
    #[inline]
    pub fn of(tensor: &Tensor) -> Self {
        let (storage, _) = tensor.storage_and_layout();
        Self(NonNull::<Storage>::from(&*storage).addr())
    }
}
