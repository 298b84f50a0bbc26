//! The GPU that the tests of a process share.

use super::{Batch, Data, layer_on, run};
use candle::{DType, Device};
use std::sync::OnceLock;

/// GPU 0, on which each thread has a stream of its own.
///
/// The whole process shares it, and its first use runs a layer: every new device compiles the
/// kernels again, which takes a driver seconds, and a device that is dropped waits for the work of
/// all others.
pub fn gpu() -> Device {
    static GPU: OnceLock<Device> = OnceLock::new();
    warm(&GPU, || Device::new_cuda(0))
}

/// GPU 0 once more, on which all threads share a stream.
pub fn gpu_of_one_stream() -> Device {
    static GPU: OnceLock<Device> = OnceLock::new();
    warm(&GPU, || Device::new_cuda_with_stream(0))
}

fn warm(gpu: &OnceLock<Device>, new: fn() -> candle::Result<Device>) -> Device {
    let new = || {
        let gpu = new().expect("a GPU");
        let (layer, _varmap) = layer_on(&gpu, 8, 1e-5.into(), DType::F32);
        let batch = Batch::random(&mut Data::on(&gpu, 1), &[4, 8], DType::F32, false);
        run(&layer, &batch, true);
        gpu.synchronize().expect("a GPU that works");
        gpu
    };
    gpu.get_or_init(new).clone()
}
