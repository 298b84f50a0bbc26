//! Sums over GPUs.
#![allow(unsafe_code)]

use super::Communicator;
use candle::backend::BackendStorage;
use candle::cuda_backend::CudaDType;
use candle::op::BackpropOp;
use candle::{CudaDevice, CudaStorage, DType, Layout, Result, Storage, Tensor};
use cudarc::driver::DeviceRepr;
use cudarc::nccl::result::NcclError;
use cudarc::nccl::{Comm, Id, NcclType, ReduceOp};
use std::sync::{Mutex, PoisonError};

/// Sums over GPUs, one for each rank, in one process or several. Feature `nccl`.
///
/// A sum is an `ncclAllReduce`, queued on the stream of the device's kernels. The host does not
/// wait for it, except for the first one, in which NCCL connects the ranks. NCCL leaves identical
/// copies of the result on all ranks.
///
/// # Streams
///
/// It sums only tensors on the stream of the device that it was given, so build its layers on that
/// device. `CudaDevice::new` has a stream per thread, so run all forwards and backwards on one
/// thread; this is not checked. `CudaDevice::new_with_stream` has one stream for all threads.
///
/// NCCL asks that all ranks use the communicators of a GPU in the same order. A program that sums
/// its gradients through another communicator while backwards are under way can deadlock. Sum them
/// through this one, in an [`Arc`](std::sync::Arc).
///
/// # Ranks that fail
///
/// NCCL checks nothing. It waits forever for a rank that failed. If a rank brings other tensors or
/// another order of sums, it waits forever too, or adds up what does not belong together, which a
/// layer turns into NaN. [Ranks](crate::guide::ranks) has more, also on CUDA graphs.
///
/// # Example
///
/// Here one process has a thread for each GPU. Over several processes, rank 0 sends its
/// `id.internal()` to the others. [`Ranks::new`](crate::Ranks::new) takes the communicator, for the
/// layers on that GPU.
///
/// ```no_run
/// use candle_powernorm::cudarc::nccl::Id;
/// use candle::{backend::BackendDevice, CudaDevice, Device, Tensor};
/// use candle_powernorm::{Communicator, NcclCommunicator};
///
/// const GPUS: usize = 4;
/// let id = Id::new().expect("NCCL");
/// std::thread::scope(|scope| {
///     for rank in 0..GPUS {
///         scope.spawn(move || -> candle::Result<()> {
///             let device = CudaDevice::new(rank)?;
///             let ranks = NcclCommunicator::new(&device, id, rank, GPUS)?;
///             let own = Tensor::new(&[rank as f32], &Device::Cuda(device))?;
///             assert_eq!(ranks.all_reduce_sum(&own)?.to_vec1::<f32>()?, [6.]);
///             Ok(())
///         });
///     }
/// });
/// ```
#[derive(Debug)]
pub struct NcclCommunicator {
    comm: Mutex<AnyThread>,
    world_size: usize,
}

/// A communicator that threads hand to each other.
#[derive(Debug)]
struct AnyThread(Comm);

// SAFETY: NCCL ties a communicator to a GPU, not to a thread. It asks that no two threads use it at
// once, and this one is behind a lock. The rest of a `Comm` is numbers and a shared stream, which
// cudarc lets any thread use.
unsafe impl Send for AnyThread {}

impl NcclCommunicator {
    /// Joins the ranks that were given the same `id`, with `device` as rank `rank` of `world_size`.
    ///
    /// It waits for the other ranks. An `id` can be used only once.
    ///
    /// # Errors
    ///
    /// `rank` is not below `world_size`, or NCCL reports an error.
    pub fn new(device: &CudaDevice, id: Id, rank: usize, world_size: usize) -> Result<Self> {
        if rank >= world_size || i32::try_from(world_size).is_err() {
            candle::bail!(
                "power_norm: NCCL: expected a rank below a world size that fits an i32, \
                 got {rank} of {world_size}"
            )
        }
        let stream = device.cuda_stream();
        // NCCL takes the GPU that is current in the thread.
        stream.context().bind_to_thread().map_err(|error| {
            let text = format!("power_norm: NCCL: expected the GPU's context, got {error}");
            candle::Error::msg(text)
        })?;
        let comm = Comm::from_rank(stream, rank, world_size, id).map_err(failure)?;
        Ok(Self {
            comm: Mutex::new(AnyThread(comm)),
            world_size,
        })
    }
}

impl Communicator for NcclCommunicator {
    fn world_size(&self) -> usize {
        self.world_size
    }

    fn all_reduce_sum(&self, tensor: &Tensor) -> Result<Tensor> {
        let (storage, layout) = tensor.storage_and_layout();
        let sum = match (&*storage, tensor.dtype()) {
            (Storage::Cuda(storage), DType::F32) => self.sum::<f32>(storage, layout)?,
            (Storage::Cuda(storage), DType::F64) => self.sum::<f64>(storage, layout)?,
            (_, dtype) => candle::bail!(
                "power_norm: NCCL: expected a tensor of F32 or F64 on a GPU, got {dtype:?} on {:?}",
                tensor.device().location()
            ),
        };
        let shape = tensor.shape();
        Ok(Tensor::from_storage(
            Storage::Cuda(sum),
            shape,
            BackpropOp::none(),
            false,
        ))
    }
}

impl NcclCommunicator {
    fn sum<T>(&self, storage: &CudaStorage, layout: &Layout) -> Result<CudaStorage>
    where
        T: CudaDType + DeviceRepr + NcclType,
    {
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle::bail!("power_norm: NCCL: expected a contiguous tensor, got {layout:?}")
        };
        let comm = self.comm.lock().unwrap_or_else(PoisonError::into_inner);
        let device = storage.device();
        let (got, expected) = (device.cuda_stream(), comm.0.stream());
        if got.context().ordinal() != expected.context().ordinal() {
            candle::bail!(
                "power_norm: NCCL: expected a tensor on GPU {}, got it on {}",
                expected.context().ordinal(),
                got.context().ordinal()
            )
        }
        if got.cu_stream() != expected.cu_stream() {
            candle::bail!(
                "power_norm: NCCL: expected a tensor on stream {:?} of its GPU, got it on {:?}",
                expected.cu_stream(),
                got.cu_stream()
            )
        }
        let values = storage.as_cuda_slice::<T>()?.slice(start..end);
        // SAFETY: the sum writes all of it, and all reads are queued after the sum.
        let mut sum = unsafe { device.alloc::<T>(end - start) }?;
        comm.0
            .all_reduce(&values, &mut sum, &ReduceOp::Sum)
            .map_err(failure)?;
        Ok(CudaStorage::wrap_cuda_slice(sum, device.clone()))
    }
}

impl Drop for NcclCommunicator {
    /// Waits for the queued sums, which cudarc would abort. If the thread panics, it does not wait.
    fn drop(&mut self) {
        let comm = self.comm.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !std::thread::panicking() {
            // The first call may only return an older error. The second one waits, and its error
            // reaches the caller with the next result.
            let context = comm.0.context();
            let _ = context.synchronize().or_else(|_| context.synchronize());
        }
    }
}

fn failure(error: NcclError) -> candle::Error {
    candle::Error::msg(format!(
        "power_norm: NCCL: expected success, got {:?}",
        error.0
    ))
}
