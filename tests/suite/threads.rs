//! One layer in many hands at once. What may hang runs under a watchdog.

use crate::common::*;
use candle::{DType, Module, Tensor, Var};
use candle_powernorm::{LayerNorm, PowerNorm, PowerNormConfig, Statistics};
#[cfg(target_os = "linux")]
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::time::Duration;

/// Many channels, to be had with few rows: then a step spends its time in the state, where threads
/// meet.
const SIZE: usize = 1024;

/// Every step of the same batch adds the same to ψ² and ν if the batch's own statistic normalizes,
/// so that the order of the steps does not show.
fn orderless() -> PowerNormConfig {
    1e-5.with_statistics(Statistics::Batch).with_warm_up(5)
}

/// Threads' steps, and the same number of steps one after another.
fn both(config: PowerNormConfig, batch: &Batch, threads: usize, steps: usize) -> [PowerNorm; 2] {
    let new = || Twin::new(&mut Data::new(2), SIZE, config, DType::F32).layer;
    let [concurrent, sequential] = [new(), new()];
    let take = |layer: &PowerNorm, steps: usize| {
        for _ in 0..steps {
            run(layer, batch, true);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| take(&concurrent.clone(), steps));
        }
    });
    take(&sequential, threads * steps);
    assert_eq!(concurrent.steps().unwrap(), threads * steps);
    [concurrent, sequential]
}

#[test]
fn steps_from_many_threads_are_all_counted() {
    in_time(|| {
        let batch = Batch::random(&mut Data::new(1), &[3, SIZE], DType::F32, true);
        let [concurrent, sequential] = both(orderless(), &batch, 6, 500);
        assert_eq!(state(&concurrent), state(&sequential));
    });
}

/// With running statistics a step depends on those before it: no order is promised, but every step
/// is counted, and the statistics are those of some order.
#[test]
fn running_statistics_survive_many_threads() {
    in_time(|| {
        let (threads, steps) = (6, 20);
        let batch = Batch::random(&mut Data::new(3), &[40, SIZE], DType::F32, false);
        let [concurrent, sequential] = both(1e-5.with_warm_up(3), &batch, threads, steps);
        assert_finite("ν", &concurrent.nu().unwrap());
        // ψ_B² is the batch's, whatever normalizes: its mean depends on the number of steps alone.
        let [phi, expected] = [concurrent, sequential].map(|layer| layer.running_phi().unwrap());
        let bound = Bound::of(DType::F32, 40 * threads * steps);
        assert_close("ψ²", &phi, &to_f64(&expected).into(), bound);
    });
}

/// Spawns forwards of a layer, and a nap before each second one: after it a worker steals rows of the
/// other one's forward. The other one, which then has to wait for them, starts the next forward in the
/// queue. Each forward sends a word when it is done.
fn forwards_and_naps<L>(
    pool: &rayon::ThreadPool,
    forwards: usize,
    layer: &L,
    xs: &Tensor,
) -> mpsc::Receiver<()>
where
    L: Module + Clone + Send + 'static,
{
    let (done, finished) = mpsc::channel();
    for k in 0..forwards {
        if k % 2 == 0 {
            pool.spawn(|| std::thread::sleep(Duration::from_micros(200)));
        }
        let (layer, xs, done) = (layer.clone(), xs.clone(), done.clone());
        pool.spawn(move || {
            layer.forward(&xs).unwrap();
            done.send(()).unwrap();
        });
    }
    finished
}

/// A rayon worker that waits for the rows of its forward may be given another forward of the same
/// layer, on the same stack: it must not wait for what its own stack holds.
#[test]
fn forwards_inside_rayon_do_not_deadlock() {
    in_time(|| {
        const FORWARDS: usize = 100;
        let (layer, _) = layer(512, orderless(), DType::F32);
        // Large enough to be cut into pieces itself.
        let batch = Batch::random(&mut Data::new(5), &[1024, 512], DType::F32, false);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build();
        let pool = pool.unwrap();
        let finished = forwards_and_naps(&pool, FORWARDS, &layer, &batch.xs);
        assert_eq!(finished.iter().count(), FORWARDS);
        assert_eq!(layer.steps().unwrap(), FORWARDS);

        pool.install(|| {
            let step = || run(&layer, &batch, true);
            rayon::join(|| rayon::join(step, step), || rayon::join(step, step));
        });
        assert_eq!(layer.steps().unwrap(), FORWARDS + 4);
        assert_finite("ψ²", &layer.running_phi().unwrap());
    });
}

/// The same with another thread that sets the layer's weight: whoever read the weight twice on one
/// stack would wait for that thread, which would wait for the first read to end.
#[test]
fn a_weight_is_set_while_rayon_runs_forwards() {
    in_time(|| {
        const FORWARDS: usize = 400;
        let weight = Var::ones(512, DType::F32, &CPU).unwrap();
        let layer = LayerNorm::new_no_bias(weight.as_tensor().clone(), 1e-5);
        let batch = Batch::random(&mut Data::new(5), &[1024, 512], DType::F32, false);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build();
        let pool = pool.unwrap();
        let finished = forwards_and_naps(&pool, FORWARDS, &layer, &batch.xs);
        let mut forwards = 0;
        while let Ok(()) = finished.recv() {
            forwards += 1;
            weight.set(&weight.as_tensor().copy().unwrap()).unwrap();
        }
        assert_eq!(forwards, FORWARDS);
    });
}

/// A process that was forked has none of rayon's threads. With one of them, a forward runs on the
/// calling thread, and goes on. (Seen: a forward of more than 65,536 elements waited forever, where
/// candle's product of matrices goes on.)
#[cfg(target_os = "linux")]
#[test]
fn a_forked_process_goes_on_with_one_thread() {
    // rayon reads the variable once, so in a process of its own, whose only other thread is the
    // harness's.
    let test = "threads::a_forward_after_a_fork";
    let (passed, text) = run_with("RAYON_NUM_THREADS", "1", &[test]);
    assert!(passed, "{text}");
}

/// Does nothing unless rayon has one thread, as in the process that the test above starts.
#[cfg(target_os = "linux")]
#[test]
fn a_forward_after_a_fork() {
    if std::env::var_os("RAYON_NUM_THREADS").is_none_or(|threads| threads != "1") {
        return;
    }
    let (layer, _) = layer(512, 1e-5.into(), DType::F32);
    let batch = Batch::random(&mut Data::new(6), &[256, 512], DType::F32, false);
    let evaluate = || bits(&forward(&layer, &batch.xs, None, false));
    let expected = evaluate();
    // The thread exists before the fork.
    rayon::join(|| (), || ());
    // SAFETY: the child runs Rust code although this process has other threads. glibc makes its
    // allocator usable in the child. The other threads, the harness's and rayon's, wait, and hold no
    // lock that the forward takes. The child ends by `_exit`, which runs nothing else.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork");
    if child == 0 {
        let same = catch_unwind(AssertUnwindSafe(|| evaluate() == expected));
        // SAFETY: ends the process.
        unsafe { libc::_exit(if matches!(same, Ok(true)) { 0 } else { 1 }) };
    }
    let start = std::time::Instant::now();
    let mut status = 0;
    // SAFETY: `status` is alive, and the child is this process's own and not yet waited for.
    while unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } == 0 {
        if start.elapsed() > Duration::from_secs(30) {
            // SAFETY: as above; a process id is not given to another before it is waited for.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, &mut status, 0);
            }
            panic!("the forked process waits");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(status, 0);
}
