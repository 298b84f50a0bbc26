//! The emulation itself: what is right comes out right, and what is wrong ends the process.

use candle_powernorm_emulation::{convert, emulate, Array, Order, Schedule};
use half::{bf16, f16};
use std::process::Command;

/// `ProbeParams` of `src/probes.h`.
#[repr(C)]
struct ProbeParams {
    from: u64,
    to: u64,
    len: i64,
}

/// A launch of a probe with `shared_bytes` of shared memory on `from`; what it writes to `to_len` floats.
fn probe(
    kernel: &str,
    (grid, block): (u32, u32),
    shared_bytes: u32,
    from: &[f32],
    to_len: usize,
    schedule: Schedule,
) -> Result<Vec<f32>, String> {
    let bytes: Vec<u8> = from.iter().flat_map(|value| value.to_ne_bytes()).collect();
    let from = Array::of(&bytes, 0);
    let to = Array::of(&vec![0; 4 * to_len], 0);
    let params = ProbeParams {
        from: from.address(),
        to: to.address(),
        len: bytes.len() as i64 / 4,
    };
    // SAFETY: the probes that go past these arrays are to be caught at it.
    unsafe {
        emulate(
            kernel,
            (grid, 1),
            (block, 1),
            shared_bytes,
            &params,
            schedule,
            0..1,
        )
    }?;
    let values = to.bytes().chunks_exact(4);
    Ok(values
        .map(|value| f32::from_ne_bytes(value.try_into().expect("4 bytes")))
        .collect())
}

fn schedule(order: Order) -> Schedule {
    Schedule {
        blocks: order,
        threads: order,
        seed: 1,
    }
}

const IN_ORDER: Schedule = Schedule {
    blocks: Order::Forward,
    threads: Order::Forward,
    seed: 1,
};

/// Runs `deed` in another process, which must end with `message`. `test` is the name of the test that calls this.
fn dies(test: &str, message: &str, deed: impl FnOnce()) {
    const DEED: &str = "CANDLE_POWERNORM_EMULATION_DEED";
    if std::env::var(DEED).is_ok_and(|name| name == test) {
        deed();
        std::process::exit(0);
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env(DEED, test)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{test} went unnoticed");
    assert!(text.contains(message), "expected {message:?}, got {text}");
}

fn numbers(len: usize) -> Vec<f32> {
    (0..len).map(|i| i as f32).collect()
}

#[test]
fn blocks_sum() {
    let from = numbers(1000);
    let expected: Vec<f32> = (from.chunks(256)).map(|block| block.iter().sum()).collect();
    for order in [Order::Forward, Order::Reverse, Order::Shuffled] {
        let sums = probe("probe_block_sum", (4, 256), 32, &from, 4, schedule(order));
        assert_eq!(sums.unwrap(), expected, "{order:?}");
    }
}

/// Shared memory is NaN before it is written.
#[test]
fn a_missing_barrier_shows() {
    let from = numbers(256);
    let sums = |order| {
        let kernel = "probe_block_sum_without_barrier";
        probe(kernel, (1, 256), 32, &from, 1, schedule(order)).unwrap()
    };
    assert!(sums(Order::Forward)[0].is_nan());
    assert!(sums(Order::Shuffled)[0].is_nan());
    // In this order the thread that reads comes last.
    assert_eq!(sums(Order::Reverse), [32640.]);
}

#[test]
fn lanes_exchange_values_of_every_size() {
    let from: Vec<f32> = (0..64).map(|i| (i * i) as f32).collect();
    let expected: Vec<f32> = (0..64)
        .map(|i: usize| from[i ^ 31] + from[i / 32 * 32])
        .collect();
    for dtype in ["float", "double", "int64"] {
        for order in [Order::Forward, Order::Reverse, Order::Shuffled] {
            let kernel = format!("probe_exchange_{dtype}");
            let to = probe(&kernel, (1, 64), 0, &from, 64, schedule(order)).unwrap();
            assert_eq!(to, expected, "{dtype} {order:?}");
        }
    }
}

#[test]
fn every_thread_runs_once() {
    let to = probe(
        "probe_count",
        (7, 1024),
        0,
        &[],
        1,
        schedule(Order::Shuffled),
    )
    .unwrap();
    assert_eq!(to[0].to_bits(), 7 * 1024);
}

#[test]
fn schedules_differ() {
    let order = |order, seed| {
        let schedule = Schedule {
            seed,
            ..schedule(order)
        };
        let mut to = probe("probe_order", (3, 64), 0, &[], 1 + 3 * 64, schedule).unwrap();
        assert_eq!(to.remove(0).to_bits(), 3 * 64);
        to
    };
    // The last to arrive at a barrier goes on first.
    let after_barrier = |mut block: Vec<f32>| {
        let last = block.pop().expect("a thread");
        block.insert(0, last);
        block
    };
    let blocks = |from: &[u32], backwards: bool| -> Vec<f32> {
        let threads = |block: &u32| {
            let mut threads: Vec<f32> = (0..64).map(|i| (block * 64 + i) as f32).collect();
            if backwards {
                threads.reverse();
            }
            after_barrier(threads)
        };
        from.iter().flat_map(threads).collect()
    };
    assert_eq!(order(Order::Forward, 1), blocks(&[0, 1, 2], false));
    assert_eq!(order(Order::Reverse, 1), blocks(&[2, 1, 0], true));
    let mut shuffled = order(Order::Shuffled, 1);
    assert_eq!(shuffled, order(Order::Shuffled, 1));
    assert_ne!(shuffled, order(Order::Shuffled, 2));
    shuffled.sort_by(f32::total_cmp);
    assert_eq!(shuffled, numbers(3 * 64));
}

#[test]
fn impossible_launches_are_refused() {
    let refusal =
        |kernel, shape, shared| probe(kernel, shape, shared, &[], 1, IN_ORDER).unwrap_err();
    assert!(refusal("probe_nothing", (1, 32), 0).contains("no such kernel"));
    assert!(refusal("probe_count", (1, 1025), 0).contains("1025 threads"));
    assert!(refusal("probe_count", (0, 32), 0).contains("a grid of 0"));
    assert!(refusal("probe_count", (1, 32), 1 << 20).contains("shared memory"));
    assert!(refusal("update_phi_f32", (1, 32), 0).contains("an argument of 24 bytes"));
}

/// Launches of one block that end the process: the message, the probe, its threads, its shared memory, and the floats
/// it reads and writes.
macro_rules! fatal {
    ($($test:ident: $message:literal, $kernel:literal, $threads:literal, $shared:literal, $from:literal, $to:literal;)*) => {
        $(#[test]
        fn $test() {
            dies(stringify!($test), $message, || {
                let from = [0.; $from];
                probe($kernel, (1, $threads), $shared, &from, $to, IN_ORDER).unwrap();
            });
        })*
    };
}

fatal! {
    a_barrier_that_some_pass_by: "32 wait and 32 have ended", "probe_half_barrier", 64, 0, 0, 1;
    two_barriers_in_place_of_one: "thread (32, 0) is at __syncthreads", "probe_two_barriers", 64, 0, 0, 1;
    an_exchange_without_a_lane: "waits at __shfl_sync", "probe_missing_lane", 32, 0, 32, 32;
    an_exchange_in_part_of_a_warp: "without all 32 lanes", "probe_exchange_float", 33, 0, 33, 33;
    a_write_past_an_array: "heap-buffer-overflow", "probe_past_global", 1, 0, 3, 3;
    a_write_past_shared_memory: "use-after-poison", "probe_past_shared", 1, 13, 13, 1;
    an_integer_overflow: "signed integer overflow", "probe_overflow", 1, 0, 3, 1;
    a_misaligned_access: "misaligned address", "probe_misaligned", 1, 0, 8, 1;
    a_stack_overflow: "stack-overflow", "probe_stack", 2, 0, 0, 1;
}

/// Against the `half` crate: widening for every value, narrowing around every value and every halfway point.
#[test]
fn half_dtypes_convert_as_they_should() {
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
    for bits in 0..=u16::MAX {
        let (half, bfloat) = (
            f16::from_bits(bits).to_f32(),
            bf16::from_bits(bits).to_f32(),
        );
        assert!(same(convert::from_half(bits), half), "{bits:#x}");
        assert!(same(convert::from_bfloat16(bits), bfloat), "{bits:#x}");
    }
    let check = |value: f32| {
        let (half, bfloat) = (f16::from_f32(value), bf16::from_f32(value));
        let ours = f16::from_bits(convert::to_half(value));
        assert!(
            ours.to_bits() == half.to_bits() || ours.is_nan() && half.is_nan(),
            "{value:e}"
        );
        let ours = bf16::from_bits(convert::to_bfloat16(value));
        assert!(
            ours.to_bits() == bfloat.to_bits() || ours.is_nan() && bfloat.is_nan(),
            "{value:e}"
        );
    };
    for bits in 0..=u16::MAX {
        let half = f16::from_bits(bits).to_f32().to_bits();
        let bfloat = bf16::from_bits(bits).to_f32().to_bits();
        // Half of the last place of either, as bits of a float; of a subnormal half it is elsewhere.
        let halfway = f16::from_bits(bits & 0x83ff).to_f32() + 2f32.powi(-25);
        for center in [
            half,
            half ^ 1 << 12,
            bfloat,
            bfloat ^ 1 << 15,
            halfway.to_bits(),
        ] {
            for delta in [0, 1, u32::MAX] {
                check(f32::from_bits(center.wrapping_add(delta)));
            }
        }
    }
}
