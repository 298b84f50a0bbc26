//! The little of cuRAND that candle calls. The numbers follow from the seed and their place alone;
//! they are not cuRAND's.

use crate::abi::{Error, Handles, Outcome, entries, put};
use crate::capture;
use crate::context::{self, lock};
use crate::engine::stream::{Submission, scramble};
use crate::queue;
use std::sync::{Arc, Mutex};

#[derive(Debug, Clone, Copy)]
pub struct Generator {
    seed: u64,
    /// Numbers that it has given.
    given: u64,
    /// As the caller names it.
    stream: u64,
}

pub static GENERATORS: Handles<Arc<Mutex<Generator>>> = Handles::new(10);

/// A distribution of numbers.
#[derive(Debug, Clone, Copy)]
enum Distribution {
    /// Above 0, up to 1.
    Uniform,
    Normal {
        mean: f64,
        deviation: f64,
    },
}

/// A number above 0, up to 1, with a fraction of `bits` bits. It follows from seed and place.
fn uniform(seed: u64, bits: u32, place: u64) -> f64 {
    let drawn = scramble(scramble(seed) ^ place.wrapping_mul(0x2545_f491_4f6c_dd1d));
    ((drawn >> (64 - bits)) + 1) as f64 / (1u64 << bits) as f64
}

impl Distribution {
    fn draw(self, seed: u64, bits: u32, place: u64) -> f64 {
        match self {
            Self::Uniform => uniform(seed, bits, place),
            Self::Normal { mean, deviation } => {
                // Box and Muller: two places make two numbers.
                let [first, second] = [place & !1, place | 1].map(|at| uniform(seed, bits, at));
                let radius = (-2. * first.ln()).sqrt();
                let (sine, cosine) = (second * std::f64::consts::TAU).sin_cos();
                mean + deviation * radius * if place & 1 == 0 { cosine } else { sine }
            }
        }
    }
}

/// Queues the drawing of `count` numbers.
fn generate(
    handle: u64,
    name: &str,
    to: u64,
    count: usize,
    is_double: bool,
    distribution: Distribution,
) -> Outcome {
    let generator = GENERATORS.get(handle)?;
    let (start, seed, stream) = {
        let mut generator = lock(&generator);
        let start = generator.given;
        generator.given += count as u64;
        (start, generator.seed, context::stream(generator.stream)?)
    };
    let bits = if is_double { 53 } else { 24 };
    queue::submit(
        &stream,
        Submission::new(name, move |memory, work| {
            let mut bytes = Vec::with_capacity(count * if is_double { 8 } else { 4 });
            for place in start..start + count as u64 {
                let value = distribution.draw(seed, bits, place);
                match is_double {
                    true => bytes.extend(value.to_le_bytes()),
                    false => bytes.extend((value as f32).to_le_bytes()),
                }
            }
            queue::view(memory, work).upload(to, &bytes)
        }),
    )
}

/// Pairs make normal numbers, so there must be an even number of them.
fn normal(count: usize, mean: f64, deviation: f64) -> Outcome<Distribution> {
    match count % 2 {
        0 => Ok(Distribution::Normal { mean, deviation }),
        _ => Err(Error::ODD_LENGTH),
    }
}

entries! {
    fn curandCreateGenerator(generator: *mut u64, _kind: u32) {
        // It allocates.
        capture::unsafe_call()?;
        context::current_device()?;
        let new = Generator { seed: 0, given: 0, stream: 0 };
        put(generator, GENERATORS.add(Arc::new(Mutex::new(new))))
    }

    fn curandDestroyGenerator(generator: u64) {
        capture::unsafe_call()?;
        GENERATORS.remove(generator)?;
        Ok(())
    }

    fn curandSetPseudoRandomGeneratorSeed(generator: u64, seed: u64) {
        let generator = GENERATORS.get(generator)?;
        let mut generator = lock(&generator);
        (generator.seed, generator.given) = (seed, 0);
        Ok(())
    }

    fn curandSetStream(generator: u64, stream: u64) {
        lock(&*GENERATORS.get(generator)?).stream = stream;
        Ok(())
    }

    fn curandGenerateUniform(generator: u64, to: u64, count: usize) {
        generate(generator, "curandGenerateUniform", to, count, false, Distribution::Uniform)
    }

    fn curandGenerateUniformDouble(generator: u64, to: u64, count: usize) {
        generate(generator, "curandGenerateUniformDouble", to, count, true, Distribution::Uniform)
    }

    fn curandGenerateNormal(generator: u64, to: u64, count: usize, mean: f32, deviation: f32) {
        let normal = normal(count, mean.into(), deviation.into())?;
        generate(generator, "curandGenerateNormal", to, count, false, normal)
    }

    fn curandGenerateNormalDouble(
        generator: u64, to: u64, count: usize, mean: f64, deviation: f64,
    ) {
        let normal = normal(count, mean, deviation)?;
        generate(generator, "curandGenerateNormalDouble", to, count, true, normal)
    }
}
