//! Each form of instruction in `forms.txt`, against arithmetic without rounding.

mod reference;

use super::{buffer, kernel, launch, shape};
use reference::{Form, Format, bits_of, is_float, ones};
use softgpu::engine::fault::Fault;
use softgpu::engine::launch::Conditions;
use softgpu::engine::stream::scramble;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The forms in this crate's kernels, of each architecture, and those in candle's that softgpu
/// knows.
const FORMS: &str = include_str!("forms.txt");

/// Inputs by chance, beside those with an operand at the edges of each binade.
const DRAWN: usize = 100_000;

/// Bits of an operand's register.
fn room_of(ty: &str) -> u32 {
    match bits_of(ty) {
        8 => 16,
        bits => bits,
    }
}

/// Least, middle and greatest numbers of each binade, of both signs, or for integers what is next
/// to powers of two.
fn edges(ty: &str) -> Vec<u64> {
    let width = room_of(ty);
    let signs = [0, 1 << (width - 1)];
    if let Some(half) = ty.strip_suffix("x2") {
        let halves = edges(half);
        let upper = halves.iter().cycle().skip(halves.len() / 3);
        return halves
            .iter()
            .zip(upper)
            .map(|(low, high)| low | high << 16)
            .collect();
    }
    if !is_float(ty) {
        let near = (0..width).flat_map(|bit| [(1u64 << bit) - 1, 1 << bit, (1 << bit) + 1]);
        return near
            .flat_map(|one| [one, one.wrapping_neg()])
            .map(|one| one & ones(width))
            .collect();
    }
    let fraction = ones(Format::of(ty).digits - 1);
    let fractions = [0, 1, fraction / 2, fraction / 2 + 1, fraction - 1, fraction];
    let binades = (0..1u64 << (width - 1)).step_by(fraction as usize + 1);
    let positive = binades.flat_map(|binade| fractions.map(|one| binade | one));
    positive
        .flat_map(|one| signs.map(|sign| sign | one))
        .collect()
}

struct Draw(u64);

impl Draw {
    fn bits(&mut self) -> u64 {
        self.0 += 1;
        scramble(self.0)
    }

    fn below(&mut self, end: u32) -> u32 {
        (self.bits() % u64::from(end)) as u32
    }

    /// An edge, any bits, a sum of few powers of two, or a float whose exponent is near another's,
    /// so that sums cancel. So results are halfway between two numbers, or next to there.
    fn operand(&mut self, ty: &str, edges: &[u64], near: u64) -> u64 {
        let (way, bits) = (self.below(4), self.bits() & ones(room_of(ty)));
        if way == 0 {
            return edges[self.below(edges.len() as u32) as usize];
        }
        if !is_float(ty) || ty.ends_with("x2") {
            let width = room_of(ty);
            let few = [(); 3].map(|()| 1 << self.below(width));
            return match way {
                1 => bits >> self.below(width),
                _ => few[0] | few[1] | few[2],
            };
        }
        if way == 1 {
            return bits;
        }
        let digits = Format::of(ty).digits;
        let exponents = ones(bits_of(ty) - digits);
        let distance = u64::from(self.below(2 * digits + 4));
        let exponent = (near % exponents + distance).saturating_sub(digits.into());
        let short = ones(1 + self.below(digits - 1));
        let fraction = bits & ones(digits - 1) & if way == 2 { !short } else { !0 };
        let sign = bits & 1 << (bits_of(ty) - 1);
        sign | exponent.min(exponents) << (digits - 1) | fraction
    }
}

fn inputs(form: &Form) -> Vec<[u64; 4]> {
    let types = &form.from;
    if types.len() == 1 && room_of(types[0]) == 16 {
        return (0..1 << 16).map(|bits| [bits, 0, 0, 0]).collect();
    }
    let edges: Vec<Vec<u64>> = types.iter().map(|ty| edges(ty)).collect();
    let fixed = edges.iter().enumerate();
    let fixed = fixed.flat_map(|(at, edges)| edges.iter().map(move |&edge| Some((at, edge))));
    let mut draw = Draw(1);
    let drawn = fixed.chain(std::iter::repeat_n(None, DRAWN)).map(|fixed| {
        let near = draw.bits() >> 1;
        let mut operands = [0; 4];
        for (at, ty) in types.iter().enumerate() {
            operands[at] = draw.operand(ty, &edges[at], near);
        }
        if let Some((at, edge)) = fixed {
            operands[at] = edge;
        }
        operands
    });
    let mut all: Vec<[u64; 4]> = drawn.collect();
    // Zeros, the least and the greatest numbers, infinity, NaN: each with each.
    let ends = edges
        .iter()
        .map(|all| all.iter().take(4).chain(all.iter().rev().take(14)));
    let ends: Vec<Vec<u64>> = ends.map(|ends| ends.copied().collect()).collect();
    let count = ends.iter().map(Vec::len).product();
    all.extend((0..count).map(|mut number: usize| {
        let mut operands = [0; 4];
        for (operand, ends) in operands.iter_mut().zip(&ends) {
            *operand = ends[number % ends.len()];
            number /= ends.len();
        }
        operands
    }));
    all
}

/// The registers of operands are 1 to 4, that of the result is 5.
fn register(ty: &str, number: usize) -> String {
    match room_of(ty) {
        1 => format!("%p{number}"),
        16 => format!("%h{number}"),
        32 => format!("%r{number}"),
        _ => format!("%rd{}", 10 + number),
    }
}

/// The results of instructions in which `$1` to `$4` are the operands and `$5` is the result.
fn run(form: &Form, instructions: &str, inputs: &[[u64; 4]]) -> Result<Vec<u64>, Fault> {
    let (input, output) = (buffer(inputs), buffer(&vec![0u64; inputs.len()]));
    let mut body = format!(
        "mov.u32 %r10, %ctaid.x; mad.lo.u32 %r10, %r10, 256, %i; \
         setp.ge.u32 %p15, %r10, {}; @%p15 bra DONE;\n\
         mad.wide.u32 %rd2, %r10, 32, %rd0; mad.wide.u32 %rd3, %r10, 8, %rd1;\n",
        inputs.len()
    );
    let mut text = instructions.replace("$5", &register(form.to, 5));
    for (index, ty) in form.from.iter().enumerate() {
        let (register, bits) = (register(ty, index + 1), room_of(ty));
        text = text.replace(&format!("${}", index + 1), &register);
        body += &match bits {
            1 => format!(
                "ld.global.u32 %r9, [%rd2+{}]; setp.ne.u32 {register}, %r9, 0;",
                8 * index
            ),
            _ => format!("ld.global.u{bits} {register}, [%rd2+{}];", 8 * index),
        };
    }
    body += &text;
    body += &match room_of(form.to) {
        1 => "selp.u32 %r5, 1, 0, %p5; st.global.u32 [%rd3], %r5;\nDONE:".to_owned(),
        bits => format!("st.global.u{bits} [%rd3], {};\nDONE:", register(form.to, 5)),
    };
    let blocks = inputs.len().div_ceil(256) as u32;
    let addresses = [input.address(), output.address()];
    let text = kernel(2, 0, &body);
    launch(
        &text,
        &shape(blocks, 256),
        &addresses,
        Conditions::default(),
    )?;
    Ok(output.read())
}

/// The form itself, as [`run`] takes it.
fn alone(form: &Form) -> String {
    match form.name {
        "mov.b32 unpacks" => "mov.b32 {%h8, %h9}, $1; mov.b32 $5, {%h9, %h8};".to_owned(),
        "mov.b64 unpacks" => "mov.b64 {%r8, %r9}, $1; mov.b64 $5, {%r9, %r8};".to_owned(),
        name if name.ends_with(" packs") => format!("{} $5, {{$1, $2}};", &name[..7]),
        name => {
            let operands: Vec<String> = (1..=form.from.len()).map(|n| format!("${n}")).collect();
            format!("{name} $5, {};", operands.join(", "))
        }
    }
}

/// The number of inputs, and the wrong results of some instructions that stand for a form.
fn compare(form: &Form, instructions: &str) -> (usize, Vec<String>) {
    let inputs = inputs(form);
    let results = match run(form, instructions, &inputs) {
        Ok(results) => results,
        Err(fault) => return (0, vec![fault.to_string()]),
    };
    let mut wrong = vec![];
    for (operands, got) in inputs.iter().zip(results) {
        let operands = &operands[..form.from.len()];
        let expected = form.expected(operands, got);
        if got != expected {
            wrong.push(format!(
                "{} of {operands:x?} is {got:#x}, not {expected:#x}",
                form.name
            ));
        }
    }
    (inputs.len(), wrong)
}

#[test]
fn each_form_returns_what_exact_arithmetic_does() {
    let forms: Vec<Form> = FORMS.lines().filter_map(Form::new).collect();
    let (next, compared) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let failures = Mutex::new(vec![]);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().unwrap().get() {
            scope.spawn(|| {
                while let Some(form) = forms.get(next.fetch_add(1, Relaxed)) {
                    let (count, wrong) = compare(form, &alone(form));
                    compared.fetch_add(count, Relaxed);
                    if let Some(first) = wrong.first() {
                        failures
                            .lock()
                            .unwrap()
                            .push(format!("{} wrong: {first}", wrong.len()));
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    println!(
        "{} forms, {} inputs, none wrong",
        forms.len(),
        compared.into_inner()
    );
}

/// The comparison finds instructions that are nearly right.
#[test]
fn a_planted_mistake_is_found() {
    for (form, instructions) in [
        ("fma.rn.f32", "mul.f32 %f1, $1, $2; add.f32 $5, %f1, $3;"),
        ("fma.rn.f64", "mul.f64 %fd1, $1, $2; add.f64 $5, %fd1, $3;"),
        ("div.rn.f32", "rcp.rn.f32 %f1, $2; mul.f32 $5, $1, %f1;"),
        ("add.f32", "add.rz.f32 $5, $1, $2;"),
        (
            "cvt.rn.f16.f64",
            "cvt.rn.f32.f64 %f1, $1; cvt.rn.f16.f32 $5, %f1;",
        ),
        (
            "max.f32",
            "setp.gt.f32 %p9, $1, $2; selp.f32 $5, $1, $2, %p9;",
        ),
        ("setp.ne.f64", "setp.neu.f64 $5, $1, $2;"),
        (
            "rsqrt.approx.f32",
            "rsqrt.approx.f32 $5, $1; mul.f32 $5, $5, 0f3F800002;",
        ),
        ("fma.rn.f16", "mul.f16 %h9, $1, $2; add.f16 $5, %h9, $3;"),
        (
            "max.NaN.f16",
            "setp.gt.f16 %p9, $1, $2; selp.b16 $5, $1, $2, %p9;",
        ),
        (
            "lg2.approx.f32",
            "lg2.approx.f32 $5, $1; mul.f32 $5, $5, 0f3F800004;",
        ),
        (
            "ex2.approx.f32",
            "ex2.approx.f32 $5, $1; mul.f32 $5, $5, 0f3F800004;",
        ),
        (
            "div.approx.f32",
            "div.rn.f32 $5, $1, $2; mul.f32 $5, $5, 0f3F800004;",
        ),
        ("sqrt.approx.ftz.f32", "sqrt.approx.f32 $5, $1;"),
        ("shr.s32", "and.b32 %r9, $2, 31; shr.s32 $5, $1, %r9;"),
        ("min.s64", "min.u64 $5, $1, $2;"),
        (
            "cvt.rzi.s64.f64",
            "cvt.rmi.f64.f64 %fd1, $1; cvt.rzi.s64.f64 $5, %fd1;",
        ),
    ] {
        let form = Form::new(form).unwrap();
        let (_, wrong) = compare(&form, instructions);
        assert!(
            !wrong.is_empty(),
            "{} as {instructions} is not found",
            form.name
        );
    }
}
