//! GELU and its gradient, each in one pass over elements, by either of two formulas.
//!
//! ```text
//! y  = x Φ(x)                   Φ(x) = (1 + tanh u)/2 with u = √(2/π) (x + 0.044715 x³),
//! dx = dy (Φ(x) + x Φ′(x))      or Φ(x) = (1 + erf(x/√2))/2
//! ```
//!
//! For negative x, `1 + tanh u` and `1 + erf` are small differences of numbers near 1: at x = −6,
//! f32 has no digit of them left. So all is computed from the small number itself, which both
//! formulas have as an exponential and a ratio. With z = |x|:
//!
//! ```text
//! s = exp(−v) r                 y/x and dx/dy are s for x < 0, and 1 − s for others
//!
//! tanh    v = 2 √(2/π) (z + 0.044715 z³)    of y:  r = 1/(1 + e), where e = exp(−v)
//!                                           of dx: r = (1 + e − z v′)/(1 + e)²
//! erf     v = z²/2                          of y:  r = R, where R(z) = exp(z²/2) erfc(z/√2)/2
//!                                           of dx: r = R − z/√(2π)
//! ```
//!
//! Nothing overflows, nothing cancels but in r of dx, which changes its sign, and the exponential is
//! the same code in both.
//!
//! # The exponent
//!
//! An error in v is a relative error of e, and by tanh v is 87 at x = −10, where a rounding of v to
//! f32 alone would be 4e-6 of the result. So v is computed more precisely than the dtype is. It is
//! a multiple of a product:
//!
//! ```text
//! tanh    v = β z (z² + κ)                       κ = 1/0.044715, β = 2 √(2/π) 0.044715
//! erf     v = β z z                              β = 1/2
//! ```
//!
//! and each factor is cut in two. Its upper part is rounded to a multiple of a power of two, so that
//! it has few bits, and products of upper parts are exact. What is left is small, so that its own
//! rounding does not count. In f32 at z = 2.718, where z is a multiple of 2⁻⁷ and z² + κ of 2⁻⁵:
//!
//! ```text
//! z      = 2.71875 − 0.00075                     z_hi has 9 bits (11 at z = 15)
//! z² + κ = 29.75 + 0.00138                       29.75 has 10 bits (13 at z = 11)
//! product = 80.8828125 − 0.0186                  80.8828125 = 2.71875 · 29.75, exactly
//! ```
//!
//! Then `exp(−v) = 2ⁿ exp(−β ρ)`, where ρ is what the product exceeds a multiple −n of ln 2/β by.
//! That constant is cut as well, so that the upper part of ρ is exact too. |β ρ| is at most ln 2/2
//! and its exponential is a Taylor polynomial. None of it needs a fused multiply-add, which the
//! baseline level does not have.
//!
//! # The ratio of erf
//!
//! R falls from 1/2 as 1/z does at last, and is a quotient P/Q of polynomials, of degrees 4 and 5 in
//! f32 (4.3e-8 of R on all z ≥ 0) and 10 and 11 in f64 (1.0e-17). They were fitted for this file,
//! with mpmath, in `t = (z − 2)/(z + 2)`, which maps all z to [−1, 1): least squares of
//! `P/(R Q) − 1` at Chebyshev's points. 25 times the weight of each point was multiplied by its
//! error, so that the largest errors became equal. All coefficients are positive, so sums do not
//! cancel.
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
use super::run::level::vectorize;
use super::run::run_chunks;
use crate::device::pass::RowNorm;
use candle::{DType, Result, Tensor};
use half::{bf16, f16};
use num_traits::Zero;
use pulp::{Simd, WithSimd};

/// A formula of GELU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Curve {
    Tanh,
    Erf,
}

/// GELU of `[x]`, or its gradient of `[x, dy]`: tensors of one shape and dtype.
pub(in crate::device) fn gelu(curve: Curve, arrays: &[&Tensor]) -> Result<Tensor> {
    match arrays[0].dtype() {
        DType::F32 => gelu_of::<f32>(curve, arrays),
        DType::F64 => gelu_of::<f64>(curve, arrays),
        DType::F16 => gelu_of::<f16>(curve, arrays),
        DType::BF16 => gelu_of::<bf16>(curve, arrays),
        other => unreachable!("an activation has no elements of {other:?}"),
    }
}

fn gelu_of<T: Element>(curve: Curve, arrays: &[&Tensor]) -> Result<Tensor> {
    let copies = arrays.iter().map(|array| array.contiguous());
    let copies = copies.collect::<Result<Vec<_>>>()?;
    let storages: Vec<_> = copies.iter().map(Tensor::storage_and_layout).collect();
    let values = storages
        .iter()
        .map(|(storage, layout)| packed(on_cpu(storage)?, layout));
    let values = values.collect::<Result<Vec<&[T]>>>()?;
    // Elements are rows of one column here.
    let rows = Rows {
        x: Matrix::packed(values[0].len(), 1, values[0]),
        residual: None,
        keep: None,
        norm: RowNorm::None,
        sums_all: false,
    };
    let (written, _) = run_chunks(&rows, true, 0, &|chunk| {
        if let Some(output) = chunk.output {
            let range = chunk.range;
            let elements = Elements {
                curve,
                x: &values[0][range.clone()],
                dy: values.get(1).map(|dy| &dy[range]),
                output,
            };
            vectorize::<T, _>(MOST_COLUMNS, elements);
        }
    });
    let y = written.y.unwrap_or_default();
    Tensor::from_vec(y, arrays[0].shape(), arrays[0].device())
}

/// Adjacent elements, with their part of the output, to be run at a level: x alone for a forward, x
/// and dy for a backward.
///
/// They pass through blocks in the dtype of the sums. So the arithmetic is compiled for two dtypes
/// and not for four, and knows no tails. That halves the machine code, and costs f32 a fifth of a
/// forward (`benches/results/activation.md`).
struct Elements<'a, 'b, T> {
    curve: Curve,
    x: &'a [T],
    dy: Option<&'a [T]>,
    output: Part<'b, T>,
}

/// The elements of a block: enough that a call costs nothing, and few enough for the first cache.
const BLOCK: usize = 512;

/// Vectors that are computed side by side, because each waits for its own results most of the time.
/// With one, a forward took 1.8 times as long in f32 and four times in bf16
/// (`benches/results/activation.md`).
const UNROLL: usize = 4;

impl<T: Element> WithSimd for Elements<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // One vector at a time: of several, the compiler keeps copies in memory, and a pass in f32
        // took twice as long. Without vectors, conversions of f16 have an overhead for each call.
        match const { has_vectors::<S, T::Acc>() } {
            true => self.walk(Span::<S, T::Acc, 1>::new(simd, 0), simd),
            false => self.walk(Span::<S, T::Acc, UNROLL>::new(simd, 0), simd),
        }
    }
}

/// The level computes more than one element at a time.
const fn has_vectors<S: Simd, A: Accumulator>() -> bool {
    size_of::<A::Vector<S>>() > size_of::<A>()
}

impl<T: Element> Elements<'_, '_, T> {
    #[inline(always)]
    fn walk<S: Simd, const K: usize>(self, first: Span<S, T::Acc, K>, simd: S) {
        let len = self.x.len();
        let apply = match (self.curve, self.dy) {
            (Curve::Tanh, None) => apply::<S, T::Acc, false, false>,
            (Curve::Tanh, Some(_)) => apply::<S, T::Acc, false, true>,
            (Curve::Erf, None) => apply::<S, T::Acc, true, false>,
            (Curve::Erf, Some(_)) => apply::<S, T::Acc, true, true>,
        };
        let (mut x, mut dy) = ([T::Acc::zero(); BLOCK], [T::Acc::zero(); BLOCK]);
        let mut output = RowWriter::new(self.output);
        let mut row = output.row::<false>(len);
        while row.len() < len {
            let start = row.len();
            let end = len.min(start + BLOCK);
            widen(first, &self.x[start..end], &mut x);
            if let Some(array) = self.dy {
                widen(first, &array[start..end], &mut dy);
            }
            apply(simd, &mut x, &dy, end - start);
            let mut at = first;
            while at.fits(end - start) {
                row.push(at.load(&x));
                at = at.next();
            }
            while row.len() < end {
                let at = Span::<_, T::Acc, 1>::new(pulp::Scalar, row.len() - start);
                row.push(at.load(&x));
            }
        }
        row.end();
    }
}

/// Writes `values` to the front of a block.
#[inline(always)]
fn widen<S: Simd, T: Element, const K: usize>(
    first: Span<S, T::Acc, K>,
    values: &[T],
    block: &mut [T::Acc; BLOCK],
) {
    let mut at = first;
    while at.fits(values.len()) {
        at.store(at.load(values), block);
        at = at.next();
    }
    for i in at.start()..values.len() {
        block[i] = values[i].widen();
    }
}

/// Replaces the first `len` elements of a block x, and perhaps some after them, by y or dx.
///
/// Not inlined, so that it is compiled once for each level and not for each dtype of elements.
#[inline(never)]
fn apply<S: Simd, A: Accumulator, const ERF: bool, const IS_GRADIENT: bool>(
    simd: S,
    x: &mut [A; BLOCK],
    dy: &[A; BLOCK],
    len: usize,
) {
    simd.vectorize(Block::<A, ERF, IS_GRADIENT> { x, dy, len });
}

struct Block<'a, A, const ERF: bool, const IS_GRADIENT: bool> {
    x: &'a mut [A; BLOCK],
    dy: &'a [A; BLOCK],
    len: usize,
}

impl<A: Accumulator, const ERF: bool, const IS_GRADIENT: bool> WithSimd
    for Block<'_, A, ERF, IS_GRADIENT>
{
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match const { has_vectors::<S, A>() } {
            true => self.in_spans(Span::<S, A, UNROLL>::new(simd, 0)),
            // The compiler makes vectors of a loop that has none.
            false => self.in_spans(Span::<S, A, 1>::new(simd, 0)),
        }
    }
}

impl<A: Accumulator, const ERF: bool, const IS_GRADIENT: bool> Block<'_, A, ERF, IS_GRADIENT> {
    #[inline(always)]
    fn in_spans<S: Simd, const K: usize>(self, at: Span<S, A, K>) {
        let blocks = self.len.min(BLOCK).div_ceil(at.width());
        let xs = self.x.chunks_exact_mut(at.width());
        let dys = self.dy.chunks_exact(at.width());
        for (x, dy) in xs.zip(dys).take(blocks) {
            let result = curve::<S, A, K, ERF, IS_GRADIENT>(at, at.load(x), at.load(dy));
            at.store(result, x);
        }
    }
}

/// What depends on the dtype of the sums.
struct Precision {
    mantissa: u32,
    /// The largest z, by tanh and by erf. From there on, y of a negative x is 0.
    most: [f64; 2],
    /// z_hi is a multiple of 2 to the power of −`z_bits`.
    z_bits: u32,
    /// The upper part of z² + κ is a multiple of 2 to the power of −`square_bits`.
    square_bits: u32,
    /// Of the polynomial of e. The next one is below half a unit in the last place.
    terms: usize,
    /// P and Q, from the highest power to the constant.
    ratio: [&'static [f64]; 2],
}

impl Precision {
    const F32: Self = Self {
        mantissa: f32::MANTISSA_DIGITS - 1,
        most: [11., 15.],
        z_bits: 7,
        square_bits: 5,
        terms: 8,
        ratio: [
            &[
                0.005659888099970577,
                0.05043463938495353,
                0.2113094689186736,
                0.4745470710787944,
                0.5000000211342415,
            ],
            &[
                0.014187234941148359,
                0.12642117261597946,
                0.5438413648004702,
                1.3164824385791813,
                1.7469813309450999,
                1.0,
            ],
        ],
    };
    const F64: Self = Self {
        mantissa: f64::MANTISSA_DIGITS - 1,
        most: [22.5, 39.],
        z_bits: 20,
        square_bits: 17,
        terms: 14,
        ratio: [
            &[
                3.3248783638049347e-07,
                9.750514292007415e-06,
                0.00014172955328222044,
                0.0013235534845330787,
                0.008716717071344353,
                0.042093682282631294,
                0.1506331502235231,
                0.39466183937577204,
                0.7272144535344234,
                0.8579023895130846,
                0.5,
            ],
            &[
                8.334234116422307e-07,
                2.4440914816539483e-05,
                0.0003560967290196638,
                0.0033420975021361803,
                0.02220316593149876,
                0.10878198896818013,
                0.3987286898042817,
                1.088392857763219,
                2.160228953764504,
                2.960062821973112,
                2.5136893398290368,
                1.0,
            ],
        ],
    };

    const fn of<A>() -> &'static Self {
        match size_of::<A>() {
            4 => &Self::F32,
            _ => &Self::F64,
        }
    }
}

/// `value` in every column, in the dtype of the sums.
#[inline(always)]
fn constant<S: Simd, A: Accumulator, const K: usize>(
    at: Span<S, A, K>,
    value: f64,
) -> Lanes<S, A, K> {
    at.splat(A::from_f64(value))
}

/// A constant in two parts, of which the first is a multiple of 2 to the power of −`bits`. It is
/// given in f64 and what f64 leaves of it.
#[inline(always)]
fn cut<S: Simd, A: Accumulator, const K: usize>(
    at: Span<S, A, K>,
    [first, rest]: [f64; 2],
    bits: u32,
) -> [Lanes<S, A, K>; 2] {
    let shift = (1u64 << bits) as f64;
    let upper = (first * shift).round() / shift;
    [constant(at, upper), constant(at, first - upper + rest)]
}

/// `value`, rounded to a multiple of 2 to the power of −`bits`.
#[inline(always)]
fn round<S: Simd, A: Accumulator, const K: usize>(
    at: Span<S, A, K>,
    value: Lanes<S, A, K>,
    bits: u32,
) -> Lanes<S, A, K> {
    // An addition of a number so large rounds to such a multiple.
    let mantissa = const { Precision::of::<A>().mantissa };
    let large = constant(at, (3u64 << (mantissa - bits - 1)) as f64);
    (value + large) - large
}

/// A polynomial, by Horner's method.
#[inline(always)]
fn polynomial<S: Simd, A: Accumulator, const K: usize>(
    at: Span<S, A, K>,
    z: Lanes<S, A, K>,
    coefficients: &[f64],
) -> Lanes<S, A, K> {
    let mut sum = constant(at, coefficients[0]);
    for &coefficient in &coefficients[1..] {
        sum = sum.mul_add(z, constant(at, coefficient));
    }
    sum
}

/// 1/k!, from 1/13! on. Of f32, the last are used.
const TAYLOR: [f64; 14] = {
    let mut coefficients = [1.; 14];
    let mut k = 1;
    while k < 14 {
        coefficients[13 - k] = coefficients[14 - k] / k as f64;
        k += 1;
    }
    coefficients
};

// In f64 and what f64 leaves of it, from mpmath with 300 bits.
const KAPPA: [f64; 2] = [22.363860002236386, -3.734262393014057e-17];
/// ln 2/β by tanh and by erf.
const STEP: [[f64; 2]; 2] = [
    [9.714091028023697, -8.542374041797814e-16],
    [1.3862943611198906, 4.638093627692599e-17],
];
/// 2 √(2/π).
const ALPHA: f64 = 1.5957691216057308;
/// By tanh and by erf.
const BETA: [f64; 2] = [0.07135481627260025, 0.5];
/// 1/√(2π).
const DENSITY: f64 = 0.3989422804014327;

/// y of x, or dx of x and dy.
#[inline(always)]
fn curve<S: Simd, A: Accumulator, const K: usize, const ERF: bool, const IS_GRADIENT: bool>(
    at: Span<S, A, K>,
    x: Lanes<S, A, K>,
    dy: Lanes<S, A, K>,
) -> Lanes<S, A, K> {
    let precision = const { Precision::of::<A>() };
    let &Precision {
        z_bits,
        square_bits,
        ..
    } = precision;
    let (zero, one) = (at.zero(), constant(at, 1.));
    let z = x.select_less(zero, zero - x, x);
    let most = constant(at, precision.most[ERF as usize]);
    let z = most.select_less(z, most, z);
    // v/β.
    let z_hi = round(at, z, z_bits);
    let z_lo = z - z_hi;
    let (square, square_lo) = (z_hi * z_hi, z_lo * (z + z_hi));
    let (product, product_lo, bits) = if ERF {
        (square, square_lo, 2 * z_bits)
    } else {
        // z² + κ, of which `square` is exact.
        let kappa = cut(at, KAPPA, 2 * z_bits);
        let (square, square_lo) = (square + kappa[0], square_lo + kappa[1]);
        let square_hi = round(at, square, square_bits);
        let product_lo = z_hi * ((square - square_hi) + square_lo);
        let product_lo = z_lo.mul_add(square + square_lo, product_lo);
        (z_hi * square_hi, product_lo, z_bits + square_bits)
    };
    // ρ.
    let step = STEP[ERF as usize];
    let n = (product + product_lo) * constant(at, -1. / step[0]);
    let n = round(at, n, 0);
    let step = cut(at, step, bits);
    let rest = n.mul_add(step[0], product) + n.mul_add(step[1], product_lo);
    // e = mantissa · 2ⁿ.
    let exponent = rest * constant(at, -BETA[ERF as usize]);
    let taylor = &TAYLOR[TAYLOR.len() - precision.terms..];
    let mantissa = polynomial(at, exponent, taylor);
    let half = round(at, n * constant(at, 0.5), 0);
    let powers = [half.power_of_two(), (n - half).power_of_two()];
    // r.
    let (mut numerator, mut denominator);
    if ERF {
        numerator = polynomial(at, z, precision.ratio[0]);
        denominator = polynomial(at, z, precision.ratio[1]);
        if IS_GRADIENT {
            numerator = (z * constant(at, -DENSITY)).mul_add(denominator, numerator);
        }
    } else {
        numerator = one;
        denominator = one + mantissa * powers[0] * powers[1];
        if IS_GRADIENT {
            let v_slope = (z * z).mul_add(constant(at, 3. * BETA[0]), constant(at, ALPHA));
            numerator = denominator - z * v_slope;
            denominator = denominator * denominator;
        }
    }
    let upper = mantissa * (numerator / denominator) * powers[0];
    let s = upper * powers[1];
    if IS_GRADIENT {
        x.select_less(zero, s, one - s) * dy
    } else {
        let of_negative = (zero - z) * upper * powers[1];
        x.select_less(zero, of_negative, x * (one - s))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::row::output::{Output, Stores};
    use crate::device::cpu::run::level::Level;

    /// GELU of x, or its gradient of x and dy, at a level.
    fn run<T: Element>(level: Level, curve: Curve, x: &[T], dy: Option<&[T]>) -> Vec<T> {
        let len = x.len();
        let mut output = Output::new(len, len, Stores::Cached);
        for output in output.parts() {
            level.run(Elements {
                curve,
                x,
                dy,
                output,
            });
        }
        output.finish()
    }

    /// x, y and its slope, from mpmath with 300 bits: `x/(1 + exp(-v))` and its derivative.
    const OF_TANH: [(f64, f64, f64); 11] = [
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

    /// The same of `x erfc(-x/√2)/2`.
    const OF_ERF: [(f64, f64, f64); 11] = [
        (-37.25, -1.9734635705229075e-302, -7.351144191316405e-301),
        (-10., -7.619853024160526e-23, -7.618400096464814e-22),
        (-5.5, -1.0444259356238245e-7, -5.733472398739924e-7),
        (-3., -0.0040496940948902835, -0.011945647204183927),
        (-1., -0.15865525393145705, -0.0833154705876863),
        (-0.75, -0.16997051428265114, 0.0007742782607648957),
        (-0.1, -0.0460172162722971, 0.4204769079752698),
        (-1e-9, -4.999999996010577e-10, 0.49999999920211546),
        (0.5, 0.34573123063700656, 0.8674951246561629),
        (2., 1.9544997361036416, 1.085231801078197),
        (7., 6.999999999991041, 1.0000000000626632),
    ];

    /// x, y and the slope.
    type Point = (f64, f64, f64);

    const CURVES: [(Curve, &[Point]); 2] = [(Curve::Tanh, &OF_TANH), (Curve::Erf, &OF_ERF)];

    /// Within a few units in the last place, each number in a vector of its own.
    fn is_exact<T: Element>(round_off: f64, curve: Curve, numbers: &[Point]) {
        for (level, &(x, y, slope)) in (Level::all().into_iter())
            .flat_map(|level| numbers.iter().map(move |numbers| (level, numbers)))
        {
            let at = [T::from_f64(x)];
            // Without a fused multiply-add P and Q have roundings of their own.
            let y_bound = if curve == Curve::Tanh { 4. } else { 8. };
            let got = run(level, curve, &at, None)[0].to_f64();
            assert!(
                (got / y - 1.).abs() < y_bound * round_off,
                "{curve:?}, {level:?}, {x}: {got:e}"
            );
            // Its terms cancel near −0.752.
            let cancels = if x == -0.75 { 700. } else { 1. };
            let dy = T::from_f64(-3.);
            let got = run(level, curve, &at, Some(&[dy]))[0].to_f64() / -3.;
            let error = (got / slope - 1.).abs();
            assert!(
                error < 10. * cancels * round_off,
                "{curve:?}, {level:?}, {x}: slope {got:e}"
            );
        }
    }

    #[test]
    fn values_and_slopes() {
        for (curve, numbers) in CURVES {
            is_exact::<f64>(2f64.powi(-53), curve, numbers);
            // These x are numbers of f32 too.
            let is_single = |&(x, _, _): &Point| x >= -10. && f64::from(x as f32) == x;
            let of_f32: Vec<_> = numbers.iter().copied().filter(is_single).collect();
            assert_eq!(of_f32.len(), 8);
            is_exact::<f32>(2f64.powi(-24), curve, &of_f32);
        }
    }

    /// Below the normal numbers a result is rounded once, to a multiple of 2⁻¹⁴⁹, and then it is −0.
    #[test]
    fn results_below_the_normal_numbers() {
        for (level, (curve, start)) in (Level::all().into_iter())
            .flat_map(|level| [(level, (Curve::Tanh, -10.)), (level, (Curve::Erf, -13.))])
        {
            let x: Vec<f32> = (0..2000).map(|i| start - i as f32 / 1000.).collect();
            let in_f64: Vec<f64> = x.iter().map(|&x| x.into()).collect();
            let y = run(level, curve, &x, None);
            let exact = run(level, curve, &in_f64, None);
            let unit = 2f64.powi(-149);
            for (i, (&y, exact)) in y.iter().zip(exact).enumerate() {
                let bound = 0.51 * unit + 4e-7 * exact.abs();
                assert!(
                    (f64::from(y) - exact).abs() <= bound,
                    "{curve:?}, {level:?}, {}: {y:e}",
                    x[i]
                );
                assert!(y.is_sign_negative());
            }
            assert!(y[600] != 0. && y[1400..].iter().all(|&y| y == 0.));
        }
    }

    /// The bits of a result depend neither on its place nor on the length, around a block.
    #[test]
    fn blocks_and_what_is_left_of_them() {
        let x: Vec<f32> = (0..2 * BLOCK + 70).map(|i| (i as f32).sin() * 4.).collect();
        let dy: Vec<f32> = x.iter().map(|x| x.cos()).collect();
        for (level, (curve, _)) in
            (Level::all().into_iter()).flat_map(|level| CURVES.map(|curve| (level, curve)))
        {
            let whole = [None, Some(&dy[..])].map(|dy| run(level, curve, &x, dy));
            for len in (1..70).chain([BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3]) {
                let from = x.len() - len;
                let dy = [None, Some(&dy[from..])];
                for (dy, whole) in dy.into_iter().zip(&whole) {
                    let part = run(level, curve, &x[from..], dy);
                    let same = part.iter().zip(&whole[from..]);
                    assert!(
                        same.clone().all(|(a, b)| a.to_bits() == b.to_bits()),
                        "{curve:?}, {level:?}, {len}"
                    );
                }
            }
        }
    }
}
