//! Sums over the processes of an MPI job.
#![allow(unsafe_code)]

use super::Communicator;
use crate::error::Error;
use candle::{DType, Result, Tensor, WithDType};
use mpi::datatype::Equivalence;
use mpi::ffi;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{AsRaw, Communicator as _};
use mpi::Threading;
use std::os::raw::c_int;
use std::sync::{Mutex, PoisonError};

/// The processes of an MPI job as ranks. Feature `mpi`.
///
/// It is meant for layers on a CPU. A tensor on a GPU is copied to the host, and its sum back. So the
/// host waits for the GPU at each sum, and no CUDA graph can hold one.
///
/// A sum is an `MPI_Allreduce`, of which MPI requires that all processes receive identical results. Its order is the
/// library's: MPI recommends, and does not require, that it be the same from run to run. A second, of two integers, goes before
/// it, by which the ranks agree on what is to be summed.
///
/// # Ranks that fail
///
/// - A tensor that cannot be summed (of another dtype than `F32` or `F64`), or one of another
///   length or dtype than the other ranks', is an error on every rank.
/// - What MPI itself reports is an error on the rank it is reported to; MPI promises nothing of the communicator
///   afterwards.
/// - A process that is killed, or that exits without `MPI_Finalize`, ends the job: `mpirun` kills the others.
/// - A rank that leaves `main` early, by an error of its own or a panic, drops its [`Universe`](mpi::environment::Universe), and
///   so waits in `MPI_Finalize` for the others, which wait for it in a sum: **a hang**. Such a rank must end the job itself, by
///   `world.abort(1)`, as the example does, or be built with `panic = "abort"`.
/// - A rank that makes fewer sums than the others, or in another order, is a hang or a mixture of sums that no engine notices.
///
/// # Example
///
/// Under `mpirun -n 4`, with the `mpi` crate in the version of this crate:
///
/// ```no_run
/// use candle::{DType, Device, Module, Result, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use candle_powernorm::{power_norm, Communicator, MpiCommunicator, Ranks};
/// use mpi::topology::SimpleCommunicator;
/// use mpi::traits::Communicator as _;
///
/// fn train(world: &SimpleCommunicator) -> Result<()> {
///     let ranks = Ranks::new(MpiCommunicator::new(world)?);
///     let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
///     let norm = power_norm(512, 1e-5, vb)?.with_ranks(&ranks);
///     // Each rank its own rows.
///     let ys = norm.forward(&Tensor::randn(0f32, 1., (8, 512), &Device::Cpu)?)?;
///     let grads = ys.sqr()?.sum_all()?.backward()?;
///     // The layer's statistics are those of all rows. Gradients of parameters are each rank's own, to be summed.
///     ranks.all_reduce_sum(grads.get(norm.weight().unwrap()).unwrap())?;
///     Ok(())
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
    /// The processes of `world`, on a duplicate of it: no message of a layer meets one of the user's.
    ///
    /// A collective call: every process of `world` makes it.
    ///
    /// # Errors
    ///
    /// MPI was initialized with less than [`Threading::Multiple`]: a layer may be called from any thread, while the rest of the
    /// program calls MPI from others.
    pub fn new(world: &SimpleCommunicator) -> Result<Self> {
        let got = mpi::environment::threading_support();
        if got < Threading::Multiple {
            return Err(failure(format!(
                "expected initialize_with_threading(Threading::Multiple), got Threading::{got:?}"
            )));
        }
        // SAFETY: a null handle is for MPI to write to; `world` is alive, and not an inter-communicator, by its type.
        let ranks = unsafe {
            let mut ranks = Duplicate(ffi::RSMPI_COMM_NULL);
            check(ffi::MPI_Comm_dup(world.as_raw(), &mut ranks.0))?;
            // As a rule an error ends the job. Here it is returned.
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
            // And what is neither, which no rank must keep to itself.
            _ => self.sum::<f32>(tensor),
        }
    }
}

impl MpiCommunicator {
    fn sum<T: Equivalence + WithDType + Default>(&self, tensor: &Tensor) -> Result<Tensor> {
        let values = values::<T>(tensor);
        let ranks = self.ranks.lock().unwrap_or_else(PoisonError::into_inner);
        // What the ranks agree on; -1 is a refusal.
        let count = values.as_ref().map_or(-1, |values| values.len() as i64);
        let own = [count, (T::DTYPE == DType::F64).into()];
        let [count, dtype] = own;
        let least = ranks.all_reduce(&[count, -count, dtype, -dtype], Operation::Min)?;
        let values = values?;
        if least != [count, -count, dtype, -dtype] {
            return Err(failure(format!(
                "expected tensors of one length and dtype on all ranks, got {count} of {:?} on this one",
                T::DTYPE
            )));
        }
        let sum = ranks.all_reduce(&values, Operation::Sum)?;
        Tensor::from_vec(sum, tensor.shape(), tensor.device())
    }
}

/// The elements of a tensor, no more than MPI can count.
fn values<T: WithDType>(tensor: &Tensor) -> Result<Vec<T>> {
    if tensor.dtype() != T::DTYPE {
        return Err(failure(format!(
            "expected a tensor of F32 or F64, got {:?}",
            tensor.dtype()
        )));
    }
    if c_int::try_from(tensor.elem_count()).is_err() {
        let got = tensor.elem_count();
        return Err(failure(format!(
            "expected at most 2^31-1 elements, got {got}"
        )));
    }
    tensor.flatten_all()?.to_vec1()
}

/// What to do with the ranks' values.
enum Operation {
    Min,
    Sum,
}

/// A communicator of this crate's own.
#[derive(Debug)]
struct Duplicate(ffi::MPI_Comm);

// SAFETY: the handle means the same in every thread of the process, and MPI, initialized with MPI_THREAD_MULTIPLE, takes calls
// from any.
unsafe impl Send for Duplicate {}

impl Duplicate {
    /// Combines every rank's `values`, of which all ranks have the same number.
    fn all_reduce<T: Equivalence + Copy + Default>(
        &self,
        values: &[T],
        operation: Operation,
    ) -> Result<Vec<T>> {
        if mpi::is_finalized() {
            return Err(failure("expected MPI in use, got it finalized".into()));
        }
        let mut result = vec![T::default(); values.len()];
        // SAFETY: both buffers hold `values.len()` elements, which fits an int, of the type that the datatype describes; one is
        // only read, the other only written. The operation is defined for integers and floats. The communicator is alive, and
        // no other call on it runs, for its owner has locked it.
        unsafe {
            let operation = match operation {
                Operation::Min => ffi::RSMPI_MIN,
                Operation::Sum => ffi::RSMPI_SUM,
            };
            check(ffi::MPI_Allreduce(
                values.as_ptr().cast(),
                result.as_mut_ptr().cast(),
                values.len() as c_int,
                T::equivalent_datatype().as_raw(),
                operation,
                self.0,
            ))?;
        }
        Ok(result)
    }
}

impl Drop for Duplicate {
    fn drop(&mut self) {
        // SAFETY: what is not null is a communicator that `new` made, and nobody else has its handle. MPI_Finalize has freed
        // it where it has run, and no other call may follow that.
        unsafe {
            if self.0 != ffi::RSMPI_COMM_NULL && !mpi::is_finalized() {
                ffi::MPI_Comm_free(&mut self.0);
            }
        }
    }
}

/// What MPI's return code says.
fn check(code: c_int) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0u8; ffi::MPI_MAX_ERROR_STRING as usize];
    let mut len = 0;
    // SAFETY: the buffer is as long as the longest text.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut len) };
    let text = String::from_utf8_lossy(&text[..len as usize]);
    Err(failure(format!("expected success, got {text}")))
}

fn failure(reason: String) -> candle::Error {
    Error::Communicator {
        engine: "MPI",
        reason,
    }
    .into()
}
