//! The little of cuBLAS that candle calls: products of matrices, in columns, as work of a stream.

use crate::abi::{Error, Handles, Outcome, entries, put};
use crate::capture;
use crate::context;
use crate::engine::memory::{Kind, View};
use crate::engine::stream::Submission;
use crate::queue;
use half::{bf16, f16};
use std::ffi::c_void;
use std::ops::{Add, Mul};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A handle of cuBLAS.
pub struct Handle {
    device: i32,
    /// As the caller names it: the thread's own stream is that of whoever multiplies.
    stream: AtomicU64,
}

pub static HANDLES: Handles<Arc<Handle>> = Handles::new(9);

/// The element types that products are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Element {
    F16,
    Bf16,
    F32,
    F64,
}

impl Element {
    /// From cuBLAS's number.
    fn new(number: u32) -> Outcome<Self> {
        match number {
            0 => Ok(Self::F32),
            1 => Ok(Self::F64),
            2 => Ok(Self::F16),
            14 => Ok(Self::Bf16),
            _ => Err(Error::NOT_SUPPORTED),
        }
    }

    fn size(self) -> u64 {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    /// # Safety
    ///
    /// `address` is that of an element.
    #[inline(always)]
    unsafe fn load(self, address: u64) -> f64 {
        // SAFETY: as this function asks.
        unsafe {
            match self {
                Self::F16 => (address as *const f16).read().into(),
                Self::Bf16 => (address as *const bf16).read().into(),
                Self::F32 => (address as *const f32).read().into(),
                Self::F64 => (address as *const f64).read(),
            }
        }
    }

    /// Rounds a sum. Sums are of f32, and for f64 of f64.
    ///
    /// # Safety
    ///
    /// `address` is that of an element.
    #[inline(always)]
    unsafe fn store(self, address: u64, value: f64) {
        // SAFETY: as this function asks.
        unsafe {
            match self {
                Self::F16 => (address as *mut f16).write(f16::from_f32(value as f32)),
                Self::Bf16 => (address as *mut bf16).write(bf16::from_f32(value as f32)),
                Self::F32 => (address as *mut f32).write(value as f32),
                Self::F64 => (address as *mut f64).write(value),
            }
        }
    }
}

/// Matrices of a batch, in columns.
#[derive(Debug, Clone, Copy)]
struct Matrices {
    address: u64,
    element: Element,
    /// Elements from one column to the next.
    leading: u64,
    /// Elements from one matrix to the next.
    stride: u64,
}

impl Matrices {
    /// As a call names them.
    fn new(address: u64, element: Element, leading: i32, stride: i64) -> Outcome<Self> {
        Ok(Self {
            address,
            element,
            leading: extent(leading)?,
            stride: extent(stride)?,
        })
    }

    /// Column `column` of matrix `batch`.
    fn column(&self, batch: u64, column: u64) -> u64 {
        self.address + (batch * self.stride + column * self.leading) * self.element.size()
    }

    /// Records an access of a matrix of `rows` by `columns`.
    fn touch(
        &self,
        view: &mut View,
        kind: Kind,
        batch: u64,
        shape: (u64, u64),
    ) -> Result<(), String> {
        let (rows, columns) = shape;
        let size = self.element.size();
        if self.leading == rows {
            return view.touch(kind, self.column(batch, 0), rows * columns * size, size);
        }
        for column in 0..columns {
            view.touch(kind, self.column(batch, column), rows * size, size)?;
        }
        Ok(())
    }
}

/// C = alpha op(A) op(B) + beta C, for each matrix of a batch.
#[derive(Debug, Clone, Copy)]
struct Product {
    transposed: (bool, bool),
    m: u64,
    n: u64,
    k: u64,
    alpha: f64,
    beta: f64,
    a: Matrices,
    b: Matrices,
    c: Matrices,
    batch: u64,
}

/// The type of the sums: f64 for matrices of f64, f32 for others.
trait Scalar: Copy + Default + Add<Output = Self> + Mul<Output = Self> + Into<f64> {
    fn from_f64(value: f64) -> Self;
    fn fused(self, factor: Self, sum: Self) -> Self;
}

macro_rules! scalars {
    ($($type:ty)*) => {$(
        impl Scalar for $type {
            #[inline(always)]
            fn from_f64(value: f64) -> Self {
                value as Self
            }

            #[inline(always)]
            fn fused(self, factor: Self, sum: Self) -> Self {
                self.mul_add(factor, sum)
            }
        }
    )*};
}

scalars!(f32 f64);

/// Rows and columns of C that are summed at once, in registers.
const ROWS: usize = 16;
const COLUMNS: usize = 4;

/// Sums a tile. `a` has `ROWS` elements for each step of k, `b` has `COLUMNS`.
#[inline(always)]
fn tile<T: Scalar>(a: &[T], b: &[T], step: impl Fn(T, T, T) -> T) -> [[T; ROWS]; COLUMNS] {
    let mut sums = [[T::default(); ROWS]; COLUMNS];
    for (a, b) in a.chunks_exact(ROWS).zip(b.chunks_exact(COLUMNS)) {
        for (sums, &b) in sums.iter_mut().zip(b) {
            for (sum, &a) in sums.iter_mut().zip(a) {
                *sum = step(a, b, *sum);
            }
        }
    }
    sums
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn tile_fused<T: Scalar>(a: &[T], b: &[T]) -> [[T; ROWS]; COLUMNS] {
    tile(a, b, T::fused)
}

fn tile_of<T: Scalar>(a: &[T], b: &[T]) -> [[T; ROWS]; COLUMNS] {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: the processor has both features.
        return unsafe { tile_fused(a, b) };
    }
    tile(a, b, |a, b, sum| a * b + sum)
}

/// Copies a matrix in panels of `width` rows, each with all its columns. Rows that fill the last
/// panel are zero. `at` is the address of an element.
///
/// # Safety
///
/// `at` returns addresses of elements for all rows and columns.
unsafe fn panels<T: Scalar>(
    element: Element,
    (rows, columns): (usize, usize),
    width: usize,
    at: impl Fn(u64, u64) -> u64,
) -> Vec<T> {
    let mut packed = vec![T::default(); rows.next_multiple_of(width) * columns];
    for (panel, packed) in packed
        .chunks_exact_mut((width * columns).max(1))
        .enumerate()
    {
        for (column, packed) in packed.chunks_exact_mut(width).enumerate() {
            let first = panel * width;
            for (i, packed) in packed.iter_mut().enumerate().take(rows - first) {
                // SAFETY: as this function asks.
                *packed =
                    T::from_f64(unsafe { element.load(at((first + i) as u64, column as u64)) });
            }
        }
    }
    packed
}

impl Product {
    fn run(&self, view: &mut View) -> Result<(), String> {
        let Self { m, n, k, .. } = *self;
        if m == 0 || n == 0 {
            return Ok(());
        }
        let shape = |transposed, rows, columns| match transposed {
            true => (columns, rows),
            false => (rows, columns),
        };
        for batch in 0..self.batch {
            if k > 0 && self.alpha != 0. {
                let a = shape(self.transposed.0, m, k);
                let b = shape(self.transposed.1, k, n);
                self.a.touch(view, Kind::Load, batch, a)?;
                self.b.touch(view, Kind::Load, batch, b)?;
            }
            if self.beta != 0. {
                self.c.touch(view, Kind::Load, batch, (m, n))?;
            }
            self.c.touch(view, Kind::Store, batch, (m, n))?;
            match self.c.element {
                Element::F64 => self.multiply::<f64>(batch),
                _ => self.multiply::<f32>(batch),
            }
        }
        Ok(())
    }

    /// Makes one product, whose accesses are checked.
    fn multiply<T: Scalar>(&self, batch: u64) {
        let Self {
            transposed,
            a,
            b,
            c,
            ..
        } = *self;
        let (m, n) = (self.m as usize, self.n as usize);
        let k = match self.alpha {
            0. => 0,
            _ => self.k as usize,
        };
        let at = |matrices: Matrices, transposed, row, column| match transposed {
            true => matrices.column(batch, row) + column * matrices.element.size(),
            false => matrices.column(batch, column) + row * matrices.element.size(),
        };
        // SAFETY: rows and columns are those of op(A) and of op(B), whose elements are checked.
        let (left, right) = unsafe {
            (
                panels::<T>(a.element, (m, k), ROWS, |row, column| {
                    at(a, transposed.0, row, column)
                }),
                // The rows of B's panels are its columns.
                panels::<T>(b.element, (n, k), COLUMNS, |row, column| {
                    at(b, transposed.1, column, row)
                }),
            )
        };
        let (alpha, beta) = (T::from_f64(self.alpha), T::from_f64(self.beta));
        for j in (0..n).step_by(COLUMNS) {
            let right = &right[j * k..][..COLUMNS * k];
            for i in (0..m).step_by(ROWS) {
                let sums = tile_of(&left[i * k..][..ROWS * k], right);
                for (column, sums) in sums.iter().enumerate().take(n - j) {
                    for (row, &sum) in sums.iter().enumerate().take(m - i) {
                        let address = at(c, false, (i + row) as u64, (j + column) as u64);
                        // SAFETY: the row is below m and the column below n, and C is checked.
                        unsafe {
                            let value = match self.beta {
                                0. => alpha * sum,
                                _ => alpha * sum + beta * T::from_f64(c.element.load(address)),
                            };
                            c.element.store(address, value.into());
                        }
                    }
                }
            }
        }
    }
}

/// Queues a product.
fn multiply(handle: u64, name: &str, product: Product) -> Outcome {
    let handle = HANDLES.get(handle)?;
    let stream = context::stream(handle.stream.load(Relaxed))?;
    if stream.device != handle.device {
        return Err(Error::INVALID_CONTEXT);
    }
    queue::submit(
        &stream,
        Submission::new(name, move |memory, work| {
            product.run(&mut queue::view(memory, work))
        }),
    )
}

fn is_transposed(operation: u32) -> Outcome<bool> {
    match operation {
        0 => Ok(false),
        // The conjugate of a real number is itself.
        1 | 2 => Ok(true),
        _ => Err(Error::INVALID_VALUE),
    }
}

/// An extent or a stride.
fn extent(value: impl TryInto<u64>) -> Outcome<u64> {
    value.try_into().map_err(|_| Error::INVALID_VALUE)
}

/// A factor, of the type that products are computed in.
///
/// # Safety
///
/// `at` is null or has such a number, in host memory.
unsafe fn factor(at: *const c_void, element: Element) -> Outcome<f64> {
    if at.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: as this function asks.
    Ok(unsafe { element.load(at as u64) })
}

entries! {
    fn cublasCreate_v2(handle: *mut u64) {
        // It allocates.
        capture::unsafe_call()?;
        let device = context::current_device()?;
        put(handle, HANDLES.add(Arc::new(Handle { device, stream: AtomicU64::new(0) })))
    }

    /// It waits for the device, as its documentation says: a capture in any thread breaks.
    fn cublasDestroy_v2(handle: u64) {
        let device = HANDLES.get(handle)?.device;
        let waited = queue::synchronize_device(device);
        HANDLES.remove(handle)?;
        waited
    }

    fn cublasSetStream_v2(handle: u64, stream: u64) {
        HANDLES.get(handle)?.stream.store(stream, Relaxed);
        Ok(())
    }

    fn cublasGemmStridedBatchedEx(
        handle: u64, transpose_a: u32, transpose_b: u32, m: i32, n: i32, k: i32,
        alpha: *const c_void, a: u64, type_a: u32, lda: i32, stride_a: i64,
        b: u64, type_b: u32, ldb: i32, stride_b: i64,
        beta: *const c_void, c: u64, type_c: u32, ldc: i32, stride_c: i64,
        batch: i32, compute: u32, _algorithm: i32,
    ) {
        let (a_element, c_element) = (Element::new(type_a)?, Element::new(type_c)?);
        let factors = match compute {
            64 | 65 => Element::F16,
            68 | 69 | 74..=79 => Element::F32,
            70 | 71 => Element::F64,
            _ => return Err(Error::NOT_SUPPORTED),
        };
        let product = Product {
            transposed: (is_transposed(transpose_a)?, is_transposed(transpose_b)?),
            m: extent(m)?,
            n: extent(n)?,
            k: extent(k)?,
            alpha: factor(alpha, factors)?,
            beta: factor(beta, factors)?,
            a: Matrices::new(a, a_element, lda, stride_a)?,
            b: Matrices::new(b, Element::new(type_b)?, ldb, stride_b)?,
            c: Matrices::new(c, c_element, ldc, stride_c)?,
            batch: extent(batch)?,
        };
        multiply(handle, "cublasGemmStridedBatchedEx", product)
    }

    fn cublasDgemmStridedBatched(
        handle: u64, transpose_a: u32, transpose_b: u32, m: i32, n: i32, k: i32,
        alpha: *const f64, a: u64, lda: i32, stride_a: i64, b: u64, ldb: i32, stride_b: i64,
        beta: *const f64, c: u64, ldc: i32, stride_c: i64, batch: i32,
    ) {
        let element = Element::F64;
        let product = Product {
            transposed: (is_transposed(transpose_a)?, is_transposed(transpose_b)?),
            m: extent(m)?,
            n: extent(n)?,
            k: extent(k)?,
            alpha: factor(alpha.cast(), element)?,
            beta: factor(beta.cast(), element)?,
            a: Matrices::new(a, element, lda, stride_a)?,
            b: Matrices::new(b, element, ldb, stride_b)?,
            c: Matrices::new(c, element, ldc, stride_c)?,
            batch: extent(batch)?,
        };
        multiply(handle, "cublasDgemmStridedBatched", product)
    }
}
