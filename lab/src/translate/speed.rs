//! Speed, as fairly as a machine that does other things too can tell it: several runs take turns.

use super::train::Run;
use anyhow::Result;
use std::time::Instant;

/// Steps of each run before its time is taken. PowerNorm's warm-up ends among them.
pub const UNTIMED: usize = 3;

/// Medians over steps.
pub struct Speed {
    pub seconds_per_step: f64,
    /// Target tokens.
    pub tokens_per_second: f64,
}

/// Lets `runs` take turns, a step each, so that whatever slows the machine down slows all of them,
/// until `steps` steps of each have been timed. `turn_over` is called after each turn.
pub fn measure(runs: &mut [Run], steps: usize, turn_over: impl Fn()) -> Result<Vec<Speed>> {
    let mut times = vec![vec![]; runs.len()];
    for step in 0..UNTIMED + steps {
        for (run, times) in runs.iter_mut().zip(&mut times) {
            let tokens = run.tokens;
            let start = Instant::now();
            run.step()?;
            // A GPU's work may be under way still, and is not the next run's.
            run.device.synchronize()?;
            let seconds = start.elapsed().as_secs_f64();
            if step >= UNTIMED {
                times.push((seconds, (run.tokens - tokens) as f64 / seconds));
            }
        }
        turn_over();
    }
    let speeds = times.into_iter().map(|times| {
        let (seconds, tokens): (Vec<_>, Vec<_>) = times.into_iter().unzip();
        Speed {
            seconds_per_step: median(seconds),
            tokens_per_second: median(tokens),
        }
    });
    Ok(speeds.collect())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        0 => (values[middle - 1] + values[middle]) / 2.,
        _ => values[middle],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_in_the_middle() {
        assert_eq!(median(vec![5., 1., 2.]), 2.);
        assert_eq!(median(vec![5., 1., 2., 3.]), 2.5);
    }
}
