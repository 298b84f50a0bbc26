//! GELU by its tanh approximation, and its gradient, each in one pass over elements.
//!
//! ```text
//! y  = x (1 + tanh u)/2 = x σ(v)                 with u = √(2/π) x (1 + 0.044715 x²), v = 2u
//! dx = dy σ(v) (1 + x v′ σ(−v))                  with σ(v) = 1/(1 + exp(−v))
//! ```
//!
//! For negative x, `1 + tanh u` is a small difference of numbers near 1: at x = −6, f32 has no digit
//! of it left. Written with the logistic σ nothing cancels. All that is needed is `e = exp(−|v|)`,
//! which cannot overflow: σ is `1/(1 + e)` for x ≥ 0, and `e/(1 + e)` for x < 0.
//!
//! # The exponent
//!
//! An error in v is a relative error of e, and |v| is 87 at x = −10, where a rounding of v to f32
//! alone would be 4e-6 of the result. So v is computed more precisely than the dtype is. With z =
//! |x|, it is the product
//!
//! ```text
//! v = β z (z² + κ)                               with κ = 1/0.044715, β = 2 √(2/π) 0.044715
//! ```
//!
//! and each factor is cut in two. Its upper part is rounded to a multiple of a power of two, so that
//! it has few bits, and products of upper parts are exact. What is left is small, so that its own
//! rounding does not count. In f32 at z = 2.718, where z is a multiple of 2⁻⁷ and z² + κ of 2⁻⁵:
//!
//! ```text
//! z      = 2.71875 − 0.00075                     z_hi has 9 bits (11 at z = 11)
//! z² + κ = 29.75 + 0.00138                       29.75 has 10 bits (13 at z = 11)
//! product = 80.8828125 − 0.0186                  80.8828125 = 2.71875 · 29.75, exactly
//! ```
//!
//! Then `exp(−v) = 2ⁿ exp(−β ρ)`, where ρ is what the product exceeds a multiple −n of ln 2/β by.
//! That constant is cut as well, so that the upper part of ρ is exact too. |β ρ| is at most ln 2/2
//! and its exponential is a Taylor polynomial. None of it needs a fused multiply-add, which the
//! baseline level does not have.
//!
//! # Ends
//!
//! z is limited to where the result is 0 in the dtype of the sums, so infinities and huge values are
//! what their limits are: x or −0, and 1 or −0 for the gradient. 2ⁿ is multiplied in two halves,
//! last, so that results below the normal numbers are rounded once. A NaN is not limited.

use super::convert::{Accumulator, Element, MOST_COLUMNS};
use super::layout::{Matrix, Rows, on_cpu, packed};
use super::row::output::{Part, RowWriter};
use super::row::vectors::{Lanes, Span};
use super::run::run_chunks;
use crate::device::pass::RowNorm;
use candle::{DType, Result, Tensor};
use half::{bf16, f16};
use num_traits::Zero;
use pulp::{Simd, WithSimd};

/// GELU of `[x]`, or its gradient of `[x, dy]`: tensors of one shape and dtype.
pub(in crate::device) fn gelu<const N: usize>(arrays: [&Tensor; N]) -> Result<Tensor> {
    match arrays[0].dtype() {
        DType::F32 => gelu_of::<f32, N>(arrays),
        DType::F64 => gelu_of::<f64, N>(arrays),
        DType::F16 => gelu_of::<f16, N>(arrays),
        DType::BF16 => gelu_of::<bf16, N>(arrays),
        other => unreachable!("an activation has no elements of {other:?}"),
    }
}

fn gelu_of<T: Activations, const N: usize>(arrays: [&Tensor; N]) -> Result<Tensor> {
    let mut copies = Vec::with_capacity(N);
    for array in arrays {
        copies.push(array.contiguous()?);
    }
    let storages: Vec<_> = copies.iter().map(Tensor::storage_and_layout).collect();
    let mut values = [&[] as &[T]; N];
    for (values, (storage, layout)) in values.iter_mut().zip(&storages) {
        *values = packed(on_cpu(storage)?, layout)?;
    }
    // Elements are rows of one column here.
    let rows = Rows {
        x: Matrix::packed(values[0].len(), 1, values[0]),
        residual: None,
        keep: None,
        norm: RowNorm::None,
        sums_all: false,
    };
    let (written, _) = run_chunks(&rows, true, 0, &|chunk| {
        let arrays = values.map(|array| &array[chunk.range.clone()]);
        if let Some(output) = chunk.output {
            T::run(Elements { arrays, output });
        }
    });
    let y = written.y.unwrap_or_default();
    Tensor::from_vec(y, arrays[0].shape(), arrays[0].device())
}

/// An [`Element`] with the functions of a chunk, which pick a level.
trait Activations: Element {
    fn run<const N: usize>(chunk: Elements<Self, N>);
}

/// Implements [`Activations`], with a module for each dtype, which is a codegen unit as those of
/// `run/mod.rs` are.
macro_rules! activations {
    ($($module:ident: $dtype:ty,)*) => {$(
        mod $module {
            use super::{Activations, Elements, MOST_COLUMNS};
            use crate::device::cpu::run::level::vectorize;

            #[inline(never)]
            fn forward(chunk: Elements<$dtype, 1>) {
                vectorize::<$dtype, _>(MOST_COLUMNS, chunk);
            }

            #[inline(never)]
            fn backward(chunk: Elements<$dtype, 2>) {
                vectorize::<$dtype, _>(MOST_COLUMNS, chunk);
            }

            impl Activations for $dtype {
                fn run<const N: usize>(Elements { arrays, output }: Elements<Self, N>) {
                    match *arrays.as_slice() {
                        [x] => forward(Elements { arrays: [x], output }),
                        [x, dy] => backward(Elements { arrays: [x, dy], output }),
                        _ => unreachable!("a pass has x, and dy in a backward"),
                    }
                }
            }
        }
    )*};
}

activations! {
    of_f32: f32,
    of_f64: f64,
    of_f16: half::f16,
    of_bf16: half::bf16,
}

/// Adjacent elements, with their part of the output, to be run at a level: x alone for a forward, x
/// and dy for a backward.
struct Elements<'a, 'b, T, const N: usize> {
    arrays: [&'a [T]; N],
    output: Part<'b, T>,
}

impl<T: Element, const N: usize> WithSimd for Elements<'_, '_, T, N> {
    type Output = ();

    // `map` of an array would not be inlined, and run in the instructions of the baseline.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { arrays, output } = self;
        let len = arrays[0].len();
        let gelu = Gelu::<T::Acc>::new();
        let mut output = RowWriter::new(output);
        let mut row = output.row::<false>(len);
        while row.len() < len {
            let at = Span::<S, T::Acc, UNROLL>::new(simd, row.len());
            let rest = len - row.len();
            let is_whole = at.width() <= rest;
            let first = Span::<S, T::Acc, UNROLL>::new(simd, 0);
            let mut lanes = [at.zero(); N];
            for (lanes, array) in lanes.iter_mut().zip(&arrays) {
                if is_whole {
                    *lanes = at.load(array);
                } else {
                    // The last elements are a part of vectors, so that the bits of a result do not
                    // depend on its place.
                    let mut padded = [T::from_f64(0.); MOST_COLUMNS];
                    padded[..rest].copy_from_slice(&array[row.len()..]);
                    *lanes = first.load(&padded);
                }
            }
            let lanes = gelu.apply(at, lanes);
            if is_whole {
                row.push(lanes);
            } else {
                let mut values = [T::Acc::zero(); MOST_COLUMNS];
                first.store(lanes, &mut values);
                for i in 0..rest {
                    row.push(Span::<_, T::Acc, 1>::new(pulp::Scalar, i).load(&values));
                }
            }
        }
        row.end();
    }
}

/// Vectors that are computed side by side, because each waits for its own results most of the time.
/// With one, a forward took 1.8 times as long in f32 and four times in bf16
/// (`benches/results/activation.md`).
const UNROLL: usize = 4;

/// The most terms of a Taylor polynomial here.
const MOST_TERMS: usize = 14;

/// What depends on the dtype of the sums.
struct Precision {
    mantissa: u32,
    /// The largest z. From there on, y of a negative x is 0.
    most: f64,
    /// z_hi is a multiple of 2 to the power of −`z_bits`.
    z_bits: u32,
    /// The upper part of z² + κ is a multiple of 2 to the power of −`square_bits`.
    square_bits: u32,
    /// Of the polynomial of e. The next one is below half a unit in the last place.
    terms: usize,
}

impl Precision {
    const F32: Self = Self {
        mantissa: f32::MANTISSA_DIGITS - 1,
        most: 11.,
        z_bits: 7,
        square_bits: 5,
        terms: 8,
    };
    const F64: Self = Self {
        mantissa: f64::MANTISSA_DIGITS - 1,
        most: 22.5,
        z_bits: 20,
        square_bits: 17,
        terms: 14,
    };

    const fn of<A>() -> &'static Self {
        match size_of::<A>() {
            4 => &Self::F32,
            _ => &Self::F64,
        }
    }

    /// A number so large that an addition of it rounds to a multiple of 2 to the power of −`bits`.
    fn rounder(&self, bits: u32) -> f64 {
        (3u64 << (self.mantissa - bits - 1)) as f64
    }
}

/// The constants of GELU in a dtype of sums.
struct Gelu<A> {
    most: A,
    round_z: A,
    round_square: A,
    round_integer: A,
    /// κ = 1/0.044715, in two parts.
    kappa: [A; 2],
    /// ln 2/β, in two parts.
    step: [A; 2],
    /// Its reciprocal, negative.
    per_step: A,
    /// −β.
    minus_beta: A,
    /// 2 √(2/π), and 3β: v′ is their sum, the second multiplied by z².
    slope: [A; 2],
    half: A,
    /// 1/k!.
    coefficients: [A; MOST_TERMS],
}

/// `value`, rounded to a multiple of the last place of `rounder`, a far larger number.
#[inline(always)]
fn round<S: Simd, A: Accumulator, const K: usize>(
    value: Lanes<S, A, K>,
    rounder: Lanes<S, A, K>,
) -> Lanes<S, A, K> {
    (value + rounder) - rounder
}

/// `exp(−|v|) = mantissa · powers[0] · powers[1]` of z = |x|, limited.
struct Exponential<L> {
    z: L,
    mantissa: L,
    powers: [L; 2],
}

impl<A: Accumulator> Gelu<A> {
    #[inline(always)]
    fn new() -> Self {
        const ALPHA: f64 = 1.5957691216057308; // 2 √(2/π)
        const BETA: f64 = 0.07135481627260025;
        // In f64 and what f64 leaves of it, from mpmath with 300 bits.
        const KAPPA: [f64; 2] = [22.363860002236386, -3.734262393014057e-17];
        const STEP: [f64; 2] = [9.714091028023697, -8.542374041797814e-16];
        let precision = Precision::of::<A>();
        let cut = |[first, rest]: [f64; 2], bits| {
            let shift = (1u64 << bits) as f64;
            let upper = (first * shift).round() / shift;
            [upper, first - upper + rest].map(A::from_f64)
        };
        let &Precision {
            most,
            z_bits,
            square_bits,
            ..
        } = precision;
        let rounder = |bits| A::from_f64(precision.rounder(bits));
        let mut coefficients = [A::one(); MOST_TERMS];
        for k in 1..MOST_TERMS {
            coefficients[k] = coefficients[k - 1] / A::from_f64(k as f64);
        }
        Self {
            most: A::from_f64(most),
            round_z: rounder(z_bits),
            round_square: rounder(square_bits),
            round_integer: rounder(0),
            kappa: cut(KAPPA, 2 * z_bits),
            step: cut(STEP, z_bits + square_bits),
            per_step: A::from_f64(-1. / STEP[0]),
            minus_beta: A::from_f64(-BETA),
            slope: [ALPHA, 3. * BETA].map(A::from_f64),
            half: A::from_f64(0.5),
            coefficients,
        }
    }

    /// y of `[x]`, or dx of `[x, dy]`.
    #[inline(always)]
    fn apply<S: Simd, const K: usize, const N: usize>(
        &self,
        at: Span<S, A, K>,
        arrays: [Lanes<S, A, K>; N],
    ) -> Lanes<S, A, K> {
        let x = arrays[0];
        let Exponential {
            z,
            mantissa,
            powers,
        } = self.exponential(at, x);
        let (zero, one) = (at.zero(), at.splat(A::one()));
        let e = mantissa * powers[0] * powers[1];
        match arrays.get(1) {
            None => {
                let of_negative = (zero - z) * mantissa * powers[0] * powers[1];
                x.select_less(zero, of_negative, x) / (one + e)
            }
            Some(&dy) => {
                let inverse = one / (one + e);
                let slope = (z * z).mul_add(at.splat(self.slope[1]), at.splat(self.slope[0]));
                // σ(−v), with the sign of x.
                let other = x.select_less(zero, zero - inverse, e * inverse);
                let slope = (z * slope).mul_add(other, one) * inverse;
                let slope = slope * x.select_less(zero, mantissa * powers[0], one);
                slope * x.select_less(zero, powers[1], one) * dy
            }
        }
    }

    #[inline(always)]
    fn exponential<S: Simd, const K: usize>(
        &self,
        at: Span<S, A, K>,
        x: Lanes<S, A, K>,
    ) -> Exponential<Lanes<S, A, K>> {
        let z = x.select_less(at.zero(), at.zero() - x, x);
        let most = at.splat(self.most);
        let z = most.select_less(z, most, z);
        // z² + κ, of which `square` is exact.
        let z_hi = round(z, at.splat(self.round_z));
        let z_lo = z - z_hi;
        let square = z_hi * z_hi + at.splat(self.kappa[0]);
        let square_lo = z_lo.mul_add(z + z_hi, at.splat(self.kappa[1]));
        // v/β.
        let square_hi = round(square, at.splat(self.round_square));
        let product = z_hi * square_hi;
        let product_lo = z_hi * ((square - square_hi) + square_lo);
        let product_lo = z_lo.mul_add(square + square_lo, product_lo);
        // ρ.
        let round_integer = at.splat(self.round_integer);
        let n = (product + product_lo) * at.splat(self.per_step);
        let n = round(n, round_integer);
        let rest = n.mul_add(at.splat(self.step[0]), product);
        let rest = rest + n.mul_add(at.splat(self.step[1]), product_lo);
        let exponent = rest * at.splat(self.minus_beta);
        let terms = const { Precision::of::<A>().terms };
        let mut mantissa = at.splat(self.coefficients[terms - 1]);
        for k in (0..terms - 1).rev() {
            mantissa = mantissa.mul_add(exponent, at.splat(self.coefficients[k]));
        }
        let half = round(n * at.splat(self.half), round_integer);
        let powers = [half.power_of_two(), (n - half).power_of_two()];
        Exponential {
            z,
            mantissa,
            powers,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::row::output::{Output, Stores};
    use crate::device::cpu::run::level::Level;

    /// GELU of `[x]`, or its gradient of `[x, dy]`, at a level.
    fn run<T: Element, const N: usize>(level: Level, arrays: [&[T]; N]) -> Vec<T> {
        let len = arrays[0].len();
        let mut output = Output::new(len, len, Stores::Cached);
        for output in output.parts() {
            level.run(Elements { arrays, output });
        }
        output.finish()
    }

    /// y and its slope, from mpmath with 300 bits: `x/(1 + exp(-v))` and its derivative, with v of
    /// this file's first equation.
    const EXACT: [(f64, f64, f64); 11] = [
        (-21., -6.016648487631484e-301, -5.773008639270406e-299),
        (-10., -1.204092348209806e-37, -2.7576380638540315e-36),
        (-5.5, -5.9276402638802624e-9, -4.676552810807415e-8),
        (-3., -0.003637392081773019, -0.011584166630969726),
        (-1., -0.1588080093917233, -0.08296408384578255),
        (-0.75, -0.1700394448343797, 0.0010617438625857023),
        (-0.1, -0.04601724895456484, 0.42047821072824326),
        (-1e-9, -4.999999996010577e-10, 0.49999999920211546),
        (0.5, 0.34571400982514394, 0.8673699035346423),
        (2., 1.954597694087775, 1.0860992566236183),
        (7., 6.999999999999997, 1.0000000000000278),
    ];

    /// Within a few units in the last place, each number in a vector of its own.
    fn is_exact<T: Element>(round_off: f64, numbers: &[(f64, f64, f64)]) {
        for (level, &(x, y, slope)) in (Level::all().into_iter())
            .flat_map(|level| numbers.iter().map(move |numbers| (level, numbers)))
        {
            let at = [T::from_f64(x)];
            let got = run(level, [&at])[0].to_f64();
            assert!(
                (got / y - 1.).abs() < 4. * round_off,
                "{level:?}, {x}: {got:e}"
            );
            // Its terms cancel at −0.7525.
            let cancels = if x == -0.75 { 700. } else { 1. };
            let dy = T::from_f64(-3.);
            let got = run(level, [&at, &[dy]])[0].to_f64() / -3.;
            let error = (got / slope - 1.).abs();
            assert!(
                error < 10. * cancels * round_off,
                "{level:?}, {x}: slope {got:e}"
            );
        }
    }

    #[test]
    fn values_and_slopes() {
        is_exact::<f64>(2f64.powi(-53), &EXACT);
        // These x are numbers of f32 too.
        let is_single = |&(x, _, _): &(f64, f64, f64)| x >= -10. && f64::from(x as f32) == x;
        let of_f32: Vec<_> = EXACT.into_iter().filter(is_single).collect();
        assert_eq!(of_f32.len(), 8);
        is_exact::<f32>(2f64.powi(-24), &of_f32);
    }

    /// Below the normal numbers a result is rounded once, to a multiple of 2⁻¹⁴⁹, and then it is −0.
    #[test]
    fn results_below_the_normal_numbers() {
        for level in Level::all() {
            let x: Vec<f32> = (0..2000).map(|i| -10. - i as f32 / 1000.).collect();
            let in_f64: Vec<f64> = x.iter().map(|&x| x.into()).collect();
            let (y, exact) = (run(level, [&x]), run(level, [&in_f64]));
            let unit = 2f64.powi(-149);
            for (i, (&y, exact)) in y.iter().zip(exact).enumerate() {
                let bound = 0.51 * unit + 4e-7 * exact.abs();
                assert!(
                    (f64::from(y) - exact).abs() <= bound,
                    "{level:?}, {}: {y:e}",
                    x[i]
                );
                assert!(y.is_sign_negative());
            }
            assert!(y[600] != 0. && y[1000..].iter().all(|&y| y == 0.));
        }
    }
}
