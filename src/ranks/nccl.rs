//! Sums over GPUs.
#![allow(unsafe_code)]

use super::Communicator;
use crate::error::Error;
use candle::backend::BackendStorage;
use candle::cuda_backend::CudaDType;
use candle::op::BackpropOp;
use candle::{CudaDevice, CudaStorage, DType, Layout, Result, Storage, Tensor};
use cudarc::driver::{DeviceRepr, DriverError};
use cudarc::nccl::result::NcclError;
use cudarc::nccl::{Comm, Id, NcclType, ReduceOp};
use std::sync::{Mutex, PoisonError};

/// GPUs as ranks, one each, in one process or several. Feature `nccl`.
///
/// A sum is an `ncclAllReduce` on the stream of the device's kernels: it is queued, and the host does not wait for it, but at the
/// first, for which NCCL connects the ranks. NCCL leaves identical copies of the result on all ranks. It sums tensors on the stream
/// of the device it was given alone, so its layers are built on that device. A device of `CudaDevice::new` has each thread's own
/// stream, and these go by one name: with such a one all forwards and backwards run in one thread, which nothing checks. (A device
/// of `CudaDevice::new_with_stream` has one stream for all threads.)
///
/// NCCL asks that all ranks use the communicators of a GPU in one order: a program that sums its gradients through another, while
/// backwards are under way, can deadlock. Sum them through this one.
///
/// # CUDA graphs
///
/// NCCL documents that its sums can be captured, from CUDA 11.3 on. A training step captured whole, forward and backward, has its
/// sums in it.
///
/// - NCCL asks that all ranks capture the same, and that all replay it.
/// - It advises one process for each GPU; threads of one process capture in the mode `THREAD_LOCAL`.
/// - The first step of each layer, which [compares](crate::PowerNorm::with_ranks) the ranks, comes before. So does a whole step after
///   a forward without a backward, whose sum the next training forward makes.
///
/// # Ranks that fail
///
/// NCCL has no look at what it is given, and no limit to its patience:
///
/// - Ranks that disagree on the length or the dtype of a tensor, or on the order of their sums, hang, or sum what does not belong
///   together, without an error. Of what layers sum they notice it once, at the first.
/// - A rank that fails, or whose process dies, leaves the others waiting on their GPUs for a sum that does not come; their host
///   waits at the next value that it reads. Have a launcher that ends all processes when one ends.
/// - What NCCL reports when a sum is queued is an error on that rank alone.
///
/// # Example
///
/// One process, a thread for each GPU. Over several processes, rank 0 sends its `id.internal()` to the others.
/// [`Ranks::new`](crate::Ranks::new) makes ranks of `NcclCommunicator`, for the layers on that GPU.
///
/// ```no_run
/// use candle::cuda_backend::cudarc::nccl::Id;
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

// SAFETY: NCCL ties a communicator to a GPU, not to a thread, and asks that no two threads use it at once; what is here is
// behind a lock. The rest of a `Comm` is numbers and a shared stream, which cudarc lets any thread use.
unsafe impl Send for AnyThread {}

impl NcclCommunicator {
    /// Joins `device`, as number `rank` of `world_size`, to the ranks that were given the same `id`.
    ///
    /// It waits for the other ranks. An `id` serves once.
    ///
    /// # Errors
    ///
    /// A `rank` that is not below `world_size`, and what NCCL reports.
    pub fn new(device: &CudaDevice, id: Id, rank: usize, world_size: usize) -> Result<Self> {
        if rank >= world_size || i32::try_from(world_size).is_err() {
            return Err(failure(format!(
                "expected a rank below a world size that fits an i32, got {rank} of {world_size}"
            )));
        }
        let stream = device.cuda_stream();
        // NCCL takes the GPU that is current in the thread.
        stream.context().bind_to_thread().map_err(driver_failure)?;
        let comm = Comm::from_rank(stream, rank, world_size, id).map_err(nccl_failure)?;
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
            (_, dtype) => {
                return Err(failure(format!(
                    "expected a tensor of F32 or F64 on a GPU, got {dtype:?} on {:?}",
                    tensor.device().location()
                )))
            }
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
            return Err(failure(format!(
                "expected a contiguous tensor, got {layout:?}"
            )));
        };
        let comm = self.comm.lock().unwrap_or_else(PoisonError::into_inner);
        let device = storage.device();
        let (got, expected) = (device.cuda_stream(), comm.0.stream());
        if got.context().ordinal() != expected.context().ordinal() {
            return Err(failure(format!(
                "expected a tensor on GPU {}, got it on {}",
                expected.context().ordinal(),
                got.context().ordinal()
            )));
        }
        if got.cu_stream() != expected.cu_stream() {
            return Err(failure(format!(
                "expected a tensor on stream {:?} of its GPU, got it on {:?}",
                expected.cu_stream(),
                got.cu_stream()
            )));
        }
        let values = storage.as_cuda_slice::<T>()?.slice(start..end);
        // SAFETY: the sum writes all of it, and whoever reads it is queued after that.
        let mut sum = unsafe { device.alloc::<T>(end - start) }?;
        comm.0
            .all_reduce(&values, &mut sum, &ReduceOp::Sum)
            .map_err(nccl_failure)?;
        Ok(CudaStorage::wrap_cuda_slice(sum, device.clone()))
    }
}

impl Drop for NcclCommunicator {
    /// Waits for the sums that are queued, which cudarc would abort, unless the thread panics.
    fn drop(&mut self) {
        let comm = self.comm.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !std::thread::panicking() {
            // A GPU that reports an error here has reported it to those who wait for its results.
            let _ = comm.0.context().synchronize();
        }
    }
}

fn nccl_failure(error: NcclError) -> candle::Error {
    failure(format!("expected success, got {:?}", error.0))
}

fn driver_failure(error: DriverError) -> candle::Error {
    failure(format!("expected the GPU's context, got {error}"))
}

fn failure(reason: String) -> candle::Error {
    Error::Communicator {
        engine: "NCCL",
        reason,
    }
    .into()
}
