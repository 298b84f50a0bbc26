//! candle_nn's fused softmax and rotary embeddings as ops with a backward.
//!
//! Each of these functions computes its output in one pass and leaves no trace in the graph. Here
//! the same function computes the output, from tensors without a graph, and an op of this crate
//! gives the output its place. The graph keeps the input and the output, where the differentiable
//! forms of candle_nn keep each intermediate result.

use super::{Computed, KEEPS_GRAPH_OF_GRADIENTS, forwards};
use crate::check::check_device;
use crate::config::state_dtype;
use candle::backend::{BackendDevice, BackendStorage};
use candle::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp3, D, DType, InplaceOp1, Layout, MetalStorage,
    Result, Shape, Storage, Tensor,
};
use candle_nn::{ops, rotary_emb};
use std::cell::RefCell;

/// The softmax over the last dimension, of any layout.
pub(crate) fn softmax_last_dim(xs: &Tensor) -> Result<Tensor> {
    const NAME: &str = "softmax_last_dim";
    if xs.rank() == 0 {
        candle::bail!("{NAME}: expected xs of rank 1 or more, got a scalar")
    }
    state_dtype(NAME, "xs", xs.dtype())?;
    if xs.elem_count() == 0 {
        // candle's function panics on empty rows.
        return Ok(xs.clone());
    }
    let packed = xs.detach().contiguous()?;
    let y = match packed.dtype() {
        // There candle adds up in half precision: the softmax of 4096 equal scores in BF16 adds up
        // to 16.
        half @ (DType::F16 | DType::BF16) if packed.device().is_cpu() => {
            ops::softmax_last_dim(&packed.to_dtype(DType::F32)?)?.to_dtype(half)?
        }
        _ => ops::softmax_last_dim(&packed)?,
    };
    match xs.track_op() {
        true => xs.apply_op1(Softmax {
            output: Computed::of(y)?,
        }),
        false => Ok(y),
    }
}

#[derive(Clone)]
struct Softmax {
    output: Computed,
}

impl CustomOp1 for Softmax {
    fn name(&self) -> &'static str {
        "softmax_last_dim"
    }

    forwards!(1);

    /// `y ⊙ (dy − Σ dy ⊙ y)`, of half precision in `F32`.
    fn bwd(&self, _xs: &Tensor, y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let dtype = state_dtype(self.name(), "xs", y.dtype())?;
        let (own, y) = (y.dtype(), graph_of_gradients(y).to_dtype(dtype)?);
        let products = (dy.to_dtype(dtype)? * &y)?;
        let sums = products.sum_keepdim(D::Minus1)?;
        let dx = (products - y.broadcast_mul(&sums)?)?;
        Ok(Some(dx.to_dtype(own)?))
    }
}

/// Which elements of a head are rotated together, and how the input is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rotation {
    /// Element i and element i + D/2 of `[batch, heads, positions, D]`.
    Halves,
    /// Elements 2i and 2i + 1 of `[batch, heads, positions, D]`.
    Interleaved,
    /// Element i and element i + D/2 of `[batch, positions, heads, D]`.
    HalvesThd,
}

impl Rotation {
    /// The function of candle_nn, which is ours too.
    fn name(self) -> &'static str {
        match self {
            Self::Halves => "rope",
            Self::Interleaved => "rope_i",
            Self::HalvesThd => "rope_thd",
        }
    }

    fn positions_dim(self) -> usize {
        if self == Self::HalvesThd { 1 } else { 2 }
    }

    fn heads_dim(self) -> usize {
        if self == Self::HalvesThd { 2 } else { 1 }
    }

    /// Rotates each pair of elements by the angle of its position: `(x₁ cos − x₂ sin, x₁ sin + x₂
    /// cos)`.
    pub fn apply(self, xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
        self.check(xs, cos, sin)?;
        if xs.elem_count() == 0 {
            return Ok(xs.clone());
        }
        let positions = xs.dim(self.positions_dim())?;
        // Of a table for each sequence, candle's functions read the rows as if there were no more
        // than positions.
        let table = |table: &Tensor| {
            let dim = table.rank() - 2;
            table.detach().narrow(dim, 0, positions)?.contiguous()
        };
        let (packed, c, s) = (xs.detach().contiguous()?, table(cos)?, table(sin)?);
        let y = match self {
            Self::Halves => rotary_emb::rope(&packed, &c, &s)?,
            Self::Interleaved => rotary_emb::rope_i(&packed, &c, &s)?,
            Self::HalvesThd => rotary_emb::rope_thd(&packed, &c, &s)?,
        };
        match [xs, cos, sin].iter().any(|tensor| tensor.track_op()) {
            true => {
                let (rotation, output) = (self, Computed::of(y)?);
                xs.apply_op3(cos, sin, Rotate { rotation, output })
            }
            false => Ok(y),
        }
    }

    fn check(self, xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<()> {
        let name = self.name();
        let &[batch, _, _, width] = xs.dims() else {
            let expected = match self {
                Self::HalvesThd => "[batch, positions, heads, width of a head]",
                _ => "[batch, heads, positions, width of a head]",
            };
            candle::bail!("{name}: expected xs {expected}, got {:?}", xs.shape())
        };
        state_dtype(name, "xs", xs.dtype())?;
        let positions = xs.dim(self.positions_dim())?;
        for (argument, table) in [("cos", cos), ("sin", sin)] {
            let fits = match *table.dims() {
                [rows, columns] => rows >= positions && columns * 2 == width,
                [tables, rows, columns] => {
                    tables == batch && rows >= positions && columns * 2 == width
                }
                _ => false,
            };
            if !fits || table.rank() != cos.rank() {
                candle::bail!(
                    "{name}: expected cos and sin of [positions, {width} / 2], or one such table \
                     for each of {batch} sequences, with at least the {positions} positions of xs, \
                     got {argument} {:?} for xs {:?}",
                    table.shape(),
                    xs.shape()
                )
            }
            if table.dtype() != xs.dtype() {
                candle::bail!(
                    "{name}: expected {argument} of dtype {:?} (as xs), got {:?}: convert it by \
                     `to_dtype`",
                    xs.dtype(),
                    table.dtype()
                )
            }
            check_device(name, argument, table.device(), xs.device())?;
        }
        Ok(())
    }

    /// The two elements of each pair, `[.., D/2]` each.
    fn pairs(self, xs: &Tensor) -> Result<[Tensor; 2]> {
        let half = xs.dim(D::Minus1)? / 2;
        let part = |which: usize| match self {
            Self::Interleaved => {
                let mut dims = xs.dims().to_vec();
                dims.pop();
                dims.extend([half, 2]);
                xs.reshape(dims)?.narrow(4, which, 1)?.squeeze(4)
            }
            _ => xs.narrow(D::Minus1, which * half, half),
        };
        Ok([part(0)?, part(1)?])
    }

    /// The gradient of a table, shaped as it, from what each rotated pair adds to it.
    fn table_gradient(self, terms: Tensor, table: &Tensor) -> Result<Tensor> {
        // The sums run over all heads.
        let dtype = state_dtype(self.name(), "xs", terms.dtype())?;
        let sums = terms.to_dtype(dtype)?.sum(self.heads_dim())?;
        let sums = match table.rank() {
            2 => sums.sum(0)?,
            _ => sums,
        };
        let dim = table.rank() - 2;
        let unused = table.dim(dim)? - sums.dim(dim)?;
        sums.to_dtype(table.dtype())?.pad_with_zeros(dim, 0, unused)
    }
}

#[derive(Clone)]
struct Rotate {
    rotation: Rotation,
    output: Computed,
}

impl CustomOp3 for Rotate {
    fn name(&self) -> &'static str {
        self.rotation.name()
    }

    forwards!(3);

    /// Rotates the gradient back. Tables that are learned get theirs too.
    fn bwd(
        &self,
        xs: &Tensor,
        cos: &Tensor,
        sin: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let wanted = [xs, cos, sin].map(Tensor::track_op);
        let [xs, cos, sin] = [xs, cos, sin].map(graph_of_gradients);
        let mut gradients = (None, None, None);
        if wanted[0] {
            gradients.0 = Some(self.rotation.apply(dy, &cos, &sin.neg()?)?);
        }
        if wanted[1] || wanted[2] {
            let ([x1, x2], [d1, d2]) = (self.rotation.pairs(&xs)?, self.rotation.pairs(dy)?);
            let of = |terms, table| self.rotation.table_gradient(terms, table).map(Some);
            if wanted[1] {
                gradients.1 = of(((&d1 * &x1)? + (&d2 * &x2)?)?, &cos)?;
            }
            if wanted[2] {
                gradients.2 = of(((&d2 * &x1)? - (&d1 * &x2)?)?, &sin)?;
            }
        }
        Ok(gradients)
    }
}

/// `tensor` in a backward: without its graph, unless candle keeps the graph of gradients.
pub(super) fn graph_of_gradients(tensor: &Tensor) -> Tensor {
    match KEEPS_GRAPH_OF_GRADIENTS.with(|keeps| *keeps) {
        true => tensor.clone(),
        false => tensor.detach(),
    }
}

impl Computed {
    /// The output that a function has just returned, of which there is no other tensor.
    /// Moves its storage, which candle's tensors do not give away, so that nothing is copied.
    pub(super) fn of(tensor: Tensor) -> Result<Self> {
        let taken = TakeStorage(RefCell::new(None));
        tensor.inplace_op1(&taken)?;
        match taken.0.into_inner() {
            Some(storage) => Ok(Self::new(storage, tensor.shape())),
            None => unreachable!("an op in place runs on the tensor's device"),
        }
    }
}

/// Replaces the storage of a tensor by one byte, and keeps it.
struct TakeStorage(RefCell<Option<Storage>>);

impl TakeStorage {
    fn take<S: BackendStorage>(&self, storage: &mut S, wrap: fn(S) -> Storage) -> Result<()>
    where
        S::Device: BackendDevice<Storage = S>,
    {
        // Not of no elements, which not all of candle's devices can allocate.
        let empty = storage.device().zeros_impl(&Shape::from(1), DType::U8)?;
        let taken = std::mem::replace(storage, empty);
        self.0.replace(Some(wrap(taken)));
        Ok(())
    }
}

impl InplaceOp1 for TakeStorage {
    fn name(&self) -> &'static str {
        "take_storage"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        self.take(storage, Storage::Cpu)
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        self.take(storage, Storage::Cuda)
    }

    fn metal_fwd(&self, storage: &mut MetalStorage, _: &Layout) -> Result<()> {
        self.take(storage, Storage::Metal)
    }
}
