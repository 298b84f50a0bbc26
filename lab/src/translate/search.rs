//! Beam search.

use super::data::{BEGIN, END, PAD, Pair, Sources, by_length, cut};
use super::model::Transformer;
use crate::common::random::Dropout;
use anyhow::Result;
use candle::{Device, Tensor};
use candle_nn::ops::log_softmax;

/// The limits of a search.
#[derive(Debug, Clone, Copy)]
pub struct Beam {
    /// Translations of a sentence that are followed at once.
    pub size: usize,
    /// `(a, b)`: a translation of n source tokens has at most a n + b tokens.
    pub max_length: (f64, usize),
    /// The power of the number of tokens that a log-probability is divided by: 0 favors short
    /// translations, 1 compares means over tokens, and more favors long ones.
    pub length_penalty: f64,
}

impl Beam {
    pub fn new(size: usize) -> Self {
        Self {
            size,
            max_length: (1.5, 10),
            length_penalty: 1.,
        }
    }
}

/// The beginning of a translation and its log-probability.
#[derive(Debug, Clone, PartialEq)]
struct Hypothesis {
    tokens: Vec<u32>,
    score: f32,
}

impl Hypothesis {
    fn and(&self, token: u32, score: f32) -> Self {
        Self {
            tokens: [&*self.tokens, &[token]].concat(),
            score,
        }
    }

    /// The score that compares hypotheses of different lengths.
    fn normalized(&self, beam: &Beam) -> f32 {
        self.score / (self.tokens.len() as f32).powf(beam.length_penalty as f32)
    }
}

/// The search for one sentence.
struct Search {
    live: Vec<Hypothesis>,
    /// The best of those that ended, best first.
    ended: Vec<Hypothesis>,
    max_length: usize,
}

impl Search {
    fn new(source: usize, beam: &Beam) -> Self {
        let (times, more) = beam.max_length;
        Self {
            live: vec![Hypothesis {
                tokens: vec![],
                score: 0.,
            }],
            ended: vec![],
            max_length: (times * source as f64) as usize + more,
        }
    }

    /// One token more for each hypothesis, of which each of `log_probabilities` has the next
    /// token's.
    fn extend(&mut self, log_probabilities: &[Vec<f32>], beam: &Beam) {
        let last = self.live[0].tokens.len() + 1 == self.max_length;
        let mut next: Vec<(usize, u32, f32)> = vec![];
        for (i, (hypothesis, row)) in self.live.iter().zip(log_probabilities).enumerate() {
            // A translation that is too long ends here.
            let tokens = (0..).zip(row).filter(|&(token, _)| match last {
                true => token == END,
                false => token != PAD && token != BEGIN,
            });
            next.extend(tokens.map(|(token, &score)| (i, token, hypothesis.score + score)));
        }
        // Each hypothesis can end in one way only, so of twice as many candidates enough go on.
        let kept = next.len().min(2 * beam.size);
        if kept < next.len() {
            next.select_nth_unstable_by(kept, |a, b| b.2.total_cmp(&a.2));
            next.truncate(kept);
        }
        next.sort_by(|a, b| b.2.total_cmp(&a.2));
        let live = std::mem::take(&mut self.live);
        for (rank, (i, token, score)) in next.into_iter().enumerate() {
            let hypothesis = live[i].and(token, score);
            if token != END {
                self.live.push(hypothesis);
            } else if rank < beam.size {
                self.ended.push(hypothesis);
            }
        }
        self.live.truncate(beam.size);
        // The first to end are short, so the search stops once no live score is above the worst of
        // `beam` that ended. A heuristic: a normalized score can still rise.
        let normalized = |hypothesis: &Hypothesis| hypothesis.normalized(beam);
        (self.ended).sort_by(|a, b| normalized(b).total_cmp(&normalized(a)));
        self.ended.truncate(beam.size);
        if let Some(last) = self.ended.get(beam.size - 1)
            && self
                .live
                .iter()
                .all(|live| normalized(live) <= normalized(last))
        {
            self.live.clear();
        }
    }

    /// The best translation, without its end.
    fn best(self) -> Vec<u32> {
        let best = self.ended.into_iter().next();
        let mut tokens = best.map_or(vec![], |best| best.tokens);
        tokens.pop();
        tokens
    }
}

/// Translates `sources` at once. `model` must be in evaluation mode.
fn translate_batch(
    model: &Transformer,
    sources: &[&[u32]],
    beam: &Beam,
    device: &Device,
) -> Result<Vec<Vec<u32>>> {
    let none = Dropout::none();
    let memory = model.encode(&Sources::new(sources, device)?, &none)?;
    let mut searches: Vec<_> =
        (sources.iter().map(|source| Search::new(source.len(), beam))).collect();
    for length in 1.. {
        let live: Vec<(u32, &Hypothesis)> = (0..)
            .zip(&searches)
            .flat_map(|(i, search)| search.live.iter().map(move |hypothesis| (i, hypothesis)))
            .collect();
        if live.is_empty() {
            break;
        }
        let tokens: Vec<u32> = (live.iter())
            .flat_map(|(_, hypothesis)| [&[BEGIN], &*hypothesis.tokens].concat())
            .collect();
        let tokens = Tensor::from_vec(tokens, (live.len(), length), device)?;
        let sentences: Vec<u32> = live.iter().map(|(i, _)| *i).collect();
        let memory = memory.select(&Tensor::new(sentences, device)?)?;
        let hidden = model.decode(&tokens, &memory, &none)?;
        let logits = model.logits(&hidden.narrow(1, length - 1, 1)?.squeeze(1)?.contiguous()?)?;
        let rows = log_softmax(&logits, 1)?.to_vec2::<f32>()?;
        let mut rows = rows.as_slice();
        for search in searches.iter_mut().filter(|search| !search.live.is_empty()) {
            let (own, others) = rows.split_at(search.live.len());
            search.extend(own, beam);
            rows = others;
        }
    }
    Ok(searches.into_iter().map(Search::best).collect())
}

/// Translates the pairs' sources, in batches whose beams have at most `tokens` source tokens
/// together. `progress` is told how many sentences are done. `model` must be in evaluation mode.
pub fn translate(
    model: &Transformer,
    pairs: &[Pair],
    beam: &Beam,
    tokens: usize,
    device: &Device,
    progress: impl Fn(usize),
) -> Result<Vec<Vec<u32>>> {
    let mut translations = vec![vec![]; pairs.len()];
    let mut done = 0;
    for batch in cut(pairs, &by_length(pairs), tokens / beam.size) {
        let sources: Vec<_> = batch.iter().map(|&i| &*pairs[i].source).collect();
        done += batch.len();
        for (i, translation) in batch
            .into_iter()
            .zip(translate_batch(model, &sources, beam, device)?)
        {
            translations[i] = translation;
        }
        progress(done);
    }
    Ok(translations)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::norm::Norm;
    use crate::translate::model::tests::{VOCAB, model, sources};
    use candle_nn::VarMap;

    const SENTENCES: [&[u32]; 3] = [&[5, 3, 4, END], &[4, END], &[3, 4, 4, 5, 5, 3, END]];

    /// The log-probabilities of what follows each of `tokens`, the first of them the beginning.
    fn log_probabilities(model: &Transformer, source: &[u32], tokens: &[u32]) -> Vec<Vec<f32>> {
        let memory = model.encode(&sources(&[source]), &Dropout::none()).unwrap();
        let tokens = Tensor::new(tokens, &Device::Cpu)
            .unwrap()
            .unsqueeze(0)
            .unwrap();
        let hidden = model.decode(&tokens, &memory, &Dropout::none()).unwrap();
        let logits = model.logits(&hidden.squeeze(0).unwrap()).unwrap();
        log_softmax(&logits, 1).unwrap().to_vec2().unwrap()
    }

    #[test]
    fn a_beam_of_one_is_greedy_and_sentences_do_not_mix() -> Result<()> {
        let model = model(Norm::Power, VOCAB, &VarMap::new())?;
        let together = translate_batch(&model, &SENTENCES, &Beam::new(1), &Device::Cpu)?;
        for (source, translation) in SENTENCES.iter().zip(together) {
            let mut greedy = vec![BEGIN];
            let longest = source.len() * 3 / 2 + 10;
            while greedy.len() < longest {
                let rows = log_probabilities(&model, source, &greedy);
                let last = (0..).zip(&rows[greedy.len() - 1]);
                let best = last.filter(|&(token, _)| token != PAD && token != BEGIN);
                let (best, _) = best.max_by(|a, b| a.1.total_cmp(b.1)).unwrap();
                if best == END {
                    break;
                }
                greedy.push(best);
            }
            assert_eq!(translation, greedy[1..]);
        }
        Ok(())
    }

    /// Two translations that ended do not end the search while another one is better so far.
    #[test]
    fn a_longer_translation_may_be_the_best() {
        let beam = Beam {
            max_length: (0., 9),
            ..Beam::new(2)
        };
        let [a, b] = [END + 1, END + 2];
        let mut search = Search::new(1, &beam);
        let scores = |of: &[(u32, f32)]| {
            let mut row = vec![-9.; b as usize + 1];
            of.iter()
                .for_each(|&(token, score)| row[token as usize] = score);
            row
        };
        search.extend(&[scores(&[(a, -0.5), (END, -1.), (b, -1.2)])], &beam);
        search.extend(
            &[scores(&[(a, -0.1), (END, -2.)]), scores(&[(END, -0.1)])],
            &beam,
        );
        assert_eq!(search.ended.len(), 2);
        let rows: Vec<_> = (search.live.iter())
            .map(|_| scores(&[(END, -0.1)]))
            .collect();
        search.extend(&rows, &beam);
        assert!(search.live.is_empty());
        assert_eq!(search.best(), [a, a]);
    }

    /// An end at once has −1, and one after a token −1.8: −0.9 for each of its two tokens.
    #[test]
    fn the_length_penalty_decides_between_lengths() {
        for (length_penalty, best) in [(0., &[][..]), (0.8, &[]), (0.9, &[5]), (1., &[5])] {
            let beam = Beam {
                length_penalty,
                ..Beam::new(2)
            };
            let mut search = Search::new(5, &beam);
            let row = |end, five| {
                let mut row = vec![-9.; 6];
                (row[END as usize], row[5]) = (end, five);
                row
            };
            search.extend(&[row(-1., -0.5)], &beam);
            search.extend(&[row(-1.3, -9.), row(-9., -9.)][..search.live.len()], &beam);
            assert_eq!(search.best(), best, "{length_penalty}");
        }
    }

    #[test]
    fn a_wide_beam_finds_the_best_of_all_translations() -> Result<()> {
        let vocab = 6;
        let model = model(Norm::Layer, vocab, &VarMap::new())?;
        let beam = Beam {
            max_length: (0., 4),
            ..Beam::new(200)
        };
        let found = translate_batch(&model, &SENTENCES, &beam, &Device::Cpu)?;
        for (source, found) in SENTENCES.iter().zip(found) {
            // All of up to three tokens before the end.
            let mut all: Vec<Vec<u32>> = vec![vec![]];
            for length in 0..3 {
                let longest: Vec<_> = all.iter().filter(|t| t.len() == length).cloned().collect();
                all.extend(longest.iter().flat_map(|tokens| {
                    (END + 1..vocab as u32).map(|token| [&**tokens, &[token]].concat())
                }));
            }
            assert_eq!(all.len(), 1 + 3 + 9 + 27);
            let score = |tokens: &[u32]| {
                let rows = log_probabilities(&model, source, &[&[BEGIN], tokens].concat());
                let next = tokens.iter().chain([&END]);
                let sum: f32 = rows
                    .iter()
                    .zip(next)
                    .map(|(row, &token)| row[token as usize])
                    .sum();
                sum / rows.len() as f32
            };
            let best = all.iter().max_by(|a, b| score(a).total_cmp(&score(b)));
            assert_eq!(Some(&found), best);
        }
        Ok(())
    }

    #[test]
    fn translations_come_in_the_order_of_the_sentences() -> Result<()> {
        let model = model(Norm::PowerV, VOCAB, &VarMap::new())?;
        let pairs = SENTENCES.map(|source| Pair {
            source: source.to_vec(),
            target: vec![END],
        });
        let beam = Beam::new(3);
        let all = translate(&model, &pairs, &beam, 24, &Device::Cpu, |_| {})?;
        for (source, translation) in SENTENCES.iter().zip(all) {
            assert_eq!(
                vec![translation],
                translate_batch(&model, &[source], &beam, &Device::Cpu)?
            );
        }
        Ok(())
    }
}
