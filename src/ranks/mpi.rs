//! Sums over the processes of an MPI job.
#![allow(unsafe_code)]

use super::Communicator;
use candle::{DType, Result, Tensor, WithDType};
use mpi::Threading;
use mpi::collective::SystemOperation;
use mpi::datatype::Equivalence;
use mpi::ffi;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{AsRaw, Communicator as _};
use std::os::raw::c_int;
use std::sync::{Mutex, PoisonError};

/// Sums over the processes of an MPI job. Feature `mpi`.
///
/// It is meant for layers on a CPU. It copies a tensor on a GPU to the host and the sum back, so
/// the host waits for the GPU at each sum, and a CUDA graph cannot hold one.
///
/// A sum is an `MPI_Allreduce`. MPI requires that all processes receive identical results. The
/// order of the addition is the library's: MPI recommends that it be the same from run to run, but
/// does not require it.
///
/// Before each sum, the ranks compare lengths and dtypes. If they differ, or a dtype is neither
/// `F32` nor `F64`, every rank gets an error. An error of MPI itself reaches the rank to which MPI
/// reports it.
///
/// A rank that leaves `main` early, by an error or a panic, **leaves the others waiting**: it must
/// call `world.abort(1)`, as in the example, or be built with `panic = "abort"`.
/// [Ranks](crate::guide::ranks) says what follows if a process dies.
///
/// # Example
///
/// It runs under `mpirun -n 4`. `candle_powernorm::mpi` is the `mpi` crate in the version that this
/// crate needs:
///
/// ```no_run
/// use candle::{DType, Device, Module, Result, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use candle_powernorm::mpi::{self, topology::SimpleCommunicator, traits::Communicator as _};
/// use candle_powernorm::{power_norm, sum_gradients, MpiCommunicator, Ranks};
/// use std::sync::Arc;
///
/// fn train(world: &SimpleCommunicator) -> Result<()> {
///     let communicator = Arc::new(MpiCommunicator::new(world)?);
///     let ranks = Ranks::new(communicator.clone());
///     let varmap = VarMap::new();
///     let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
///     let norm = power_norm(512, 1e-5, vb)?.with_ranks(&ranks);
///     // Each rank has its own rows.
///     let ys = norm.forward(&Tensor::randn(0f32, 1., (8, 512), &Device::Cpu)?)?;
///     let mut gradients = ys.sqr()?.sum_all()?.backward()?;
///     // The layer took its statistics over the rows of all ranks. The gradients of parameters are
///     // each rank's own until they are summed.
///     sum_gradients(&communicator, &varmap, &mut gradients)
/// }
///
/// let (universe, _) = mpi::initialize_with_threading(mpi::Threading::Multiple).unwrap();
/// let world = universe.world();
/// if let Err(error) = train(&world) {
///     eprintln!("rank {}: {error}", world.rank());
///     world.abort(1);
/// }
/// ```
#[derive(Debug)]
pub struct MpiCommunicator {
    /// Collective calls on one communicator must not overlap.
    ranks: Mutex<Duplicate>,
    world_size: usize,
}

impl MpiCommunicator {
    /// Sums over the processes of `world`. It uses a duplicate of `world`, so that no message of a
    /// layer meets a message of yours.
    ///
    /// Every process of `world` must make this call.
    ///
    /// # Errors
    ///
    /// - MPI was initialized with less than `Threading::Multiple`, which is needed because layers
    ///   and the rest of the program may call MPI from different threads.
    /// - MPI cannot duplicate `world`.
    pub fn new(world: &SimpleCommunicator) -> Result<Self> {
        let got = mpi::environment::threading_support();
        if got < Threading::Multiple {
            candle::bail!(
                "power_norm: MPI: expected initialize_with_threading(Threading::Multiple), \
                 got Threading::{got:?}"
            )
        }
        // SAFETY: MPI writes to a null handle. By its type, `world` is alive and not an
        // inter-communicator.
        let ranks = unsafe {
            let mut ranks = Duplicate(ffi::RSMPI_COMM_NULL);
            check(ffi::MPI_Comm_dup(world.as_raw(), &mut ranks.0))?;
            // By default an error ends the job. Here it is returned.
            check(ffi::MPI_Comm_set_errhandler(
                ranks.0,
                ffi::RSMPI_ERRORS_RETURN,
            ))?;
            ranks
        };
        Ok(Self {
            ranks: Mutex::new(ranks),
            world_size: world.size() as usize,
        })
    }
}

impl Communicator for MpiCommunicator {
    fn world_size(&self) -> usize {
        self.world_size
    }

    fn all_reduce_sum(&self, tensor: &Tensor) -> Result<Tensor> {
        match tensor.dtype() {
            DType::F64 => self.sum::<f64>(tensor),
            // Other dtypes too: `sum` fails for them, on all ranks.
            _ => self.sum::<f32>(tensor),
        }
    }
}

impl MpiCommunicator {
    fn sum<T: Equivalence + WithDType + Default>(&self, tensor: &Tensor) -> Result<Tensor> {
        let values = values::<T>(tensor);
        let ranks = self.ranks.lock().unwrap_or_else(PoisonError::into_inner);
        // All ranks must have the same numbers. A count of -1 stands for a rank that failed.
        let count = values.as_ref().map_or(-1, |values| values.len() as i64);
        let dtype = i64::from(T::DTYPE == DType::F64);
        let least = ranks.all_reduce(&[count, -count, dtype, -dtype], SystemOperation::min())?;
        let values = values?;
        if least != [count, -count, dtype, -dtype] {
            candle::bail!(
                "power_norm: MPI: expected tensors of one length and dtype on all ranks, \
                 got {count} of {:?} on this one: make the same calls in the same order on all \
                 ranks",
                T::DTYPE
            )
        }
        let sum = ranks.all_reduce(&values, SystemOperation::sum())?;
        Tensor::from_vec(sum, tensor.shape(), tensor.device())
    }
}

/// The elements of a tensor, no more than MPI can count.
fn values<T: WithDType>(tensor: &Tensor) -> Result<Vec<T>> {
    let (dtype, len) = (tensor.dtype(), tensor.elem_count());
    if dtype != T::DTYPE {
        candle::bail!("power_norm: MPI: expected a tensor of F32 or F64, got {dtype:?}")
    }
    if c_int::try_from(len).is_err() {
        candle::bail!("power_norm: MPI: expected at most 2^31-1 elements, got {len}")
    }
    tensor.flatten_all()?.to_vec1()
}

/// A communicator of this crate's own.
#[derive(Debug)]
struct Duplicate(ffi::MPI_Comm);

// SAFETY: the handle means the same in every thread of the process. MPI takes calls from any
// thread, because it was initialized with MPI_THREAD_MULTIPLE.
unsafe impl Send for Duplicate {}

impl Duplicate {
    /// Combines every rank's `values`. All ranks bring the same number of values.
    fn all_reduce<T: Equivalence + Copy + Default>(
        &self,
        values: &[T],
        operation: SystemOperation,
    ) -> Result<Vec<T>> {
        if mpi::is_finalized() {
            candle::bail!("power_norm: MPI: expected MPI in use, got it finalized")
        }
        let mut result = vec![T::default(); values.len()];
        // SAFETY: each buffer holds `values.len()` elements of the datatype, a number that fits an
        // int (see `values`). The operation is defined for integers and floats. The communicator is
        // alive, and its owner has locked it.
        unsafe {
            check(ffi::MPI_Allreduce(
                values.as_ptr().cast(),
                result.as_mut_ptr().cast(),
                values.len() as c_int,
                T::equivalent_datatype().as_raw(),
                operation.as_raw(),
                self.0,
            ))?;
        }
        Ok(result)
    }
}

impl Drop for Duplicate {
    fn drop(&mut self) {
        // SAFETY: a handle that is not null is of a communicator that `new` made, and nobody else
        // has it. If MPI_Finalize has run, it has freed the communicator, and no call may follow.
        unsafe {
            if self.0 != ffi::RSMPI_COMM_NULL && !mpi::is_finalized() {
                ffi::MPI_Comm_free(&mut self.0);
            }
        }
    }
}

/// Turns MPI's return code into an error with MPI's text.
fn check(code: c_int) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0u8; ffi::MPI_MAX_ERROR_STRING as usize];
    let mut len = 0;
    // SAFETY: the buffer is as long as the longest text.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut len) };
    let text = String::from_utf8_lossy(&text[..len as usize]);
    candle::bail!("power_norm: MPI: expected success, got {text}")
}
