//! The comparison of ranks before they add up their sums.
//!
//! Sums are all that ranks exchange. So each rank hashes what all ranks must have in common into
//! one fingerprint of 64 bits, and brings the fingerprint's 16-bit pieces and their squares to a
//! sum over all ranks. From that sum alone every rank finds whether all fingerprints are equal: see
//! [`all_equal`]. It does not find what the others brought. If fingerprints differ, each rank
//! prints its own announcement, and a person compares the texts.
//!
//! Where the sums stay on a GPU, the kernels that read them compare the same numbers in the same
//! way (`ranks_agree` in `kernels/power_norm.cu`).

use super::Exchange;
use crate::config::PowerNormConfig;
use std::fmt;

/// A layer, its call and its settings, which must be equal on all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Announcement {
    /// The layer's number among the layers with ranks, counted from 0.
    pub layer: usize,
    pub exchange: Exchange,
    /// t before the step. `None` in a recalibration, which does not depend on t.
    pub step_count: Option<usize>,
    pub size: usize,
    pub config: PowerNormConfig,
    /// The length of the message that brings the sums. It tells a CPU from a GPU, whose messages
    /// do not count ranks whose calls failed.
    pub message_len: usize,
    /// On a GPU, the number of the turn among those of its ranks, counted from 0. A call that fails
    /// there sends no message but takes a turn, so that from then on the ranks' numbers differ.
    /// `None` on a CPU, where a call that fails takes part in the exchange.
    pub turn: Option<usize>,
}

const WORDS: usize = 15;

/// A fingerprint is compared in pieces of this many bits. The sum of their squares is exact in f64
/// for up to 2²¹ ranks.
const PIECE_BITS: u32 = 16;

const PIECES: usize = (u64::BITS / PIECE_BITS) as usize;

/// The numbers that a rank brings for its fingerprint: each piece, and the square of each piece.
pub(super) const ANNOUNCED: usize = 2 * PIECES;

impl Announcement {
    /// Every field, as a number.
    fn words(&self) -> [u64; WORDS] {
        // Both patterns are complete, so that the compiler asks for a field that is added.
        let Self {
            layer,
            exchange,
            step_count,
            size,
            config,
            message_len,
            turn,
        } = *self;
        let PowerNormConfig {
            eps,
            alpha_fwd,
            alpha_bwd,
            warmup_steps,
            group_scaling,
            statistics,
            recipe,
            affine,
            // A layer without `affine` has no bias either way.
            bias: _,
        } = config;
        [
            layer as u64,
            exchange as u64,
            // A step count is at most `i64::MAX`.
            step_count.map_or(u64::MAX, |t| t as u64),
            size as u64,
            // A layer does not accept 0 groups.
            group_scaling.map_or(0, |groups| groups as u64),
            recipe as u64,
            statistics as u64,
            warmup_steps as u64,
            affine.into(),
            config.has_bias().into(),
            eps.to_bits(),
            alpha_fwd.to_bits(),
            alpha_bwd.to_bits(),
            message_len as u64,
            turn.map_or(u64::MAX, |turn| turn as u64),
        ]
    }

    /// A hash of every field. It is the same on every machine, in every process and with every
    /// version of Rust, which std's hashers do not promise.
    ///
    /// Announcements that differ in one field never have one fingerprint: the words before that
    /// field leave the same hash, the field's word then makes two different ones, and [`mix`] maps
    /// different values to different values from there on. If several fields differ, two
    /// fingerprints are equal with a probability of about 2⁻⁶⁴.
    pub fn fingerprint(&self) -> u64 {
        self.words().iter().fold(0, |hash, word| mix(hash ^ word))
    }
}

impl fmt::Display for Announcement {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let call = match self.exchange {
            Exchange::Forward => "a training forward",
            Exchange::Recalibration => "a recalibration",
            Exchange::Backward => "a backward",
        };
        write!(f, "layer {} in {call}, step count ", self.layer)?;
        match self.step_count {
            Some(t) => write!(f, "{t}")?,
            None => f.write_str("not compared")?,
        }
        let config = &self.config;
        write!(
            f,
            ", size {}, group_scaling {:?}, recipe {:?}, statistics {:?}, warmup_steps {}, \
             affine {}, bias {}, eps {:?}, alpha_fwd {:?}, alpha_bwd {:?}, \
             and sums in a message of {} numbers",
            self.size,
            config.group_scaling,
            config.recipe,
            config.statistics,
            config.warmup_steps,
            config.affine,
            config.has_bias(),
            config.eps,
            config.alpha_fwd,
            config.alpha_bwd,
            self.message_len,
        )?;
        match self.turn {
            Some(turn) => write!(f, ", in turn {turn}"),
            None => Ok(()),
        }
    }
}

/// One output of SplitMix64 from the state `state`: a map from u64 onto u64 that is one to one, and
/// in which each bit of `state` changes each bit of the output with a probability near 1/2.
///
/// The generator is of Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators"
/// (OOPSLA 2014). Its constants are those of Sebastiano Vigna's `splitmix64.c`.
fn mix(state: u64) -> u64 {
    /// 2⁶⁴ divided by the golden ratio, rounded to an odd number.
    const GOLDEN_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;
    /// Shifts and factors of David Stafford's finalizer "Mix13". Odd factors and shifts that are
    /// XORed in can be undone, which makes the map one to one.
    const FACTORS: [u64; 2] = [0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb];
    const SHIFTS: [u32; 3] = [30, 27, 31];
    let z = state.wrapping_add(GOLDEN_GAMMA);
    let z = (z ^ z >> SHIFTS[0]).wrapping_mul(FACTORS[0]);
    let z = (z ^ z >> SHIFTS[1]).wrapping_mul(FACTORS[1]);
    z ^ z >> SHIFTS[2]
}

/// The numbers that a rank with this fingerprint brings to a sum: its pieces, then their squares.
pub(super) fn announced(fingerprint: u64) -> [f64; ANNOUNCED] {
    let mut numbers = [0.; ANNOUNCED];
    for k in 0..PIECES {
        let piece = fingerprint >> (k as u32 * PIECE_BITS) & ((1 << PIECE_BITS) - 1);
        numbers[k] = piece as f64;
        numbers[PIECES + k] = (piece * piece) as f64;
    }
    numbers
}

/// `true` if all `ranks` brought the same numbers as this one. `own` is what this rank brought, and
/// `global` is the sum over all ranks.
///
/// Let one piece be x on this rank and x₁, …, xₙ on all n ranks. If Σxᵢ = n·x and Σxᵢ² = n·x², then
/// the xᵢ have the mean x and the mean square x², so their variance is 0 and all are equal. If they
/// are not all equal, their variance is not 0, and no rank whatever finds both sums to be its own
/// times n. So all ranks come to one answer. The arithmetic is exact (see [`PIECE_BITS`]).
pub(super) fn all_equal(own: &[f64; ANNOUNCED], global: &[f64], ranks: usize) -> bool {
    (own.iter().zip(global)).all(|(own, sum)| *sum == ranks as f64 * own)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Recipe, Statistics};

    fn usual() -> Announcement {
        Announcement {
            layer: 3,
            exchange: Exchange::Forward,
            step_count: Some(7),
            size: 512,
            config: PowerNormConfig {
                group_scaling: Some(2),
                ..1e-5.into()
            },
            message_len: 522,
            turn: None,
        }
    }

    /// Calculated by another program (in Python), from the order of the words and the constants.
    /// A fingerprint that changed from one build to the next would set their ranks apart.
    #[test]
    fn a_fingerprint_is_the_same_everywhere() {
        assert_eq!(usual().fingerprint(), 0xf317_04f7_7d52_e56e);
    }

    /// The first outputs from the state 1234567. Each state is the one before, plus the constant.
    #[test]
    fn mix_is_splitmix64() {
        let outputs = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
            16_408_922_859_458_223_821,
        ];
        let mut state = 1_234_567u64;
        for output in outputs {
            assert_eq!(mix(state), output);
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        }
    }

    /// A change of any one field changes the fingerprint, and the text.
    #[test]
    fn a_fingerprint_has_every_field() {
        type Change = fn(&mut Announcement);
        let changes: &[Change] = &[
            |one| one.layer += 1,
            |one| one.exchange = Exchange::Backward,
            |one| one.exchange = Exchange::Recalibration,
            |one| one.step_count = Some(8),
            |one| one.step_count = Some(0),
            |one| one.step_count = Some(i64::MAX as usize),
            |one| one.step_count = None,
            |one| one.size += 1,
            |one| one.config.group_scaling = Some(4),
            |one| one.config.group_scaling = Some(1),
            |one| one.config.group_scaling = None,
            |one| one.config.recipe = Recipe::Fairseq,
            |one| one.config.statistics = Statistics::Batch,
            |one| one.config.warmup_steps += 1,
            |one| one.config.affine = false,
            |one| one.config.bias = false,
            |one| one.config.eps = 1e-6,
            |one| one.config.eps = 1e-5f64.next_up(),
            |one| one.config.alpha_fwd = 0.99,
            |one| one.config.alpha_bwd = 0.99,
            |one| one.message_len += 1,
            |one| one.turn = Some(0),
            |one| one.turn = Some(1),
        ];
        let mut seen = vec![usual()];
        for change in changes {
            let mut one = usual();
            change(&mut one);
            for other in &seen {
                let what = format!("{one} and {other}");
                assert_ne!(one.fingerprint(), other.fingerprint(), "{what}");
                assert_ne!(one.to_string(), other.to_string());
            }
            let again = one;
            assert_eq!(one.fingerprint(), again.fingerprint());
            seen.push(one);
        }
    }

    /// Two fields that swap their values are another announcement.
    #[test]
    fn a_fingerprint_has_the_order_of_the_fields() {
        let (mut one, mut other) = (usual(), usual());
        (one.layer, one.size) = (1, 2);
        (other.layer, other.size) = (2, 1);
        assert_ne!(one.fingerprint(), other.fingerprint());
        (one, other) = (usual(), usual());
        (one.config.alpha_fwd, one.config.alpha_bwd) = (0.8, 0.9);
        (other.config.alpha_fwd, other.config.alpha_bwd) = (0.9, 0.8);
        assert_ne!(one.fingerprint(), other.fingerprint());
    }

    /// A layer without a weight has no bias, whatever the configuration says of one.
    #[test]
    fn a_bias_that_no_layer_has_is_not_compared() {
        let (mut one, mut other) = (usual(), usual());
        (one.config.affine, one.config.bias) = (false, true);
        (other.config.affine, other.config.bias) = (false, false);
        assert_eq!(one.fingerprint(), other.fingerprint());
        assert_eq!(one.to_string(), other.to_string());
    }

    #[test]
    fn text() {
        assert_eq!(
            usual().to_string(),
            "layer 3 in a training forward, step count 7, size 512, group_scaling Some(2), \
             recipe Paper, statistics Running, warmup_steps 100, affine true, bias true, \
             eps 1e-5, alpha_fwd 0.9, alpha_bwd 0.9, \
             and sums in a message of 522 numbers"
        );
        let recalibration = Announcement {
            exchange: Exchange::Recalibration,
            step_count: None,
            ..usual()
        };
        let text = recalibration.to_string();
        assert!(text.starts_with("layer 3 in a recalibration, step count not compared, size 512"));
    }

    /// The answer of each rank. All ranks come to the same one.
    fn answers(fingerprints: &[u64]) -> Vec<bool> {
        let mut global = [0.; ANNOUNCED];
        for fingerprint in fingerprints {
            for (sum, number) in global.iter_mut().zip(announced(*fingerprint)) {
                *sum += number;
            }
        }
        let answer = |own: &u64| all_equal(&announced(*own), &global, fingerprints.len());
        fingerprints.iter().map(answer).collect()
    }

    #[test]
    fn equal_fingerprints_are_equal() {
        for ranks in 1..=4 {
            for fingerprint in [0, 1, 0xffff, 1 << 63, u64::MAX, usual().fingerprint()] {
                assert_eq!(answers(&vec![fingerprint; ranks]), vec![true; ranks]);
            }
        }
        // Sums are exact for 2²¹ ranks, of which each brings the largest square.
        let ranks = 1 << 21;
        let own = announced(u64::MAX);
        let mut global = own.map(|number| number * ranks as f64);
        assert!(all_equal(&own, &global, ranks));
        global[PIECES] -= 1.;
        assert!(!all_equal(&own, &global, ranks));
    }

    /// No rank takes different fingerprints for equal ones.
    #[test]
    fn different_fingerprints_are_different_on_every_rank() {
        let cases: &[&[u64]] = &[
            &[0, 1],
            &[0, u64::MAX],
            // The middle rank has the mean of all.
            &[1, 2, 3],
            &[0, 0x8000, 0xffff, 0x8000],
            // The third rank has the mean of all squares, (1 + 49)/2 = 5².
            &[1, 7, 5],
            &[1, 7, 5, 5],
            // Both halves have one sum, and one sum of squares.
            &[0x0001_0002, 0x0002_0001],
            &[0x0001_0002, 0x0002_0001, 0x0001_0002, 0x0002_0001],
            // Sums carry from one piece into the next.
            &[0xffff, 0x1_0000],
            &[0xffff, 0xffff, 0x1_0000, 0x1_0000],
            // One rank of four.
            &[5, 5, 5, 6],
            &[6, 5, 5, 5],
            // Numbers that f64 does not tell apart.
            &[1 << 53, (1 << 53) + 1],
            &[u64::MAX - 1, u64::MAX],
        ];
        for case in cases {
            assert_eq!(answers(case), vec![false; case.len()], "{case:x?}");
        }
        // A single bit, of any piece.
        for bit in 0..64 {
            for ranks in 2..=4 {
                for who in 0..ranks {
                    let mut fingerprints = vec![usual().fingerprint(); ranks];
                    fingerprints[who] ^= 1 << bit;
                    assert_eq!(answers(&fingerprints), vec![false; ranks], "{bit} {who}");
                }
            }
        }
        // Every set of four small pieces, in the lowest and the highest place.
        for pieces in 0..6u64.pow(4) {
            let fingerprints = [0, 1, 2, 3].map(|k| (pieces / 6u64.pow(k)) % 6);
            let equal = fingerprints.iter().all(|piece| *piece == fingerprints[0]);
            for shift in [0, 48] {
                let fingerprints = fingerprints.map(|piece| piece << shift);
                assert_eq!(answers(&fingerprints), vec![equal; 4], "{fingerprints:x?}");
            }
        }
    }
}
