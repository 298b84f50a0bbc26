//! A training step in a CUDA graph. The tests of other targets may drop devices, which breaks a
//! capture: here nothing else runs, and one test at a time.

mod common;

use candle::cuda_backend::cudarc::driver::{CudaGraph, sys};
use candle::{CudaDevice, DType, Device, Var};
use candle_powernorm::{PowerNorm, Ranks};
use common::distributed::Same;
use common::{
    Batch, Data, PATHS, RowNorm, Twin, assert_same_bits, config, run, same_state, state, thinned,
};
use std::sync::{Mutex, PoisonError};

static ALONE: Mutex<()> = Mutex::new(());

/// A device whose work can be captured: all of it is on one stream, without events.
fn capturable() -> (CudaDevice, Device) {
    let device = CudaDevice::new_with_stream(0).expect("a GPU");
    // SAFETY: all work is on one stream, whose order is all the order it needs. (With a record of
    // events, the capture would wait for some from before it, which is an error.)
    unsafe { device.disable_event_tracking() };
    (device.clone(), Device::Cuda(device))
}

/// Records what `step` launches.
fn capture(device: &CudaDevice, step: impl FnOnce()) -> CudaGraph {
    let stream = device.cuda_stream();
    stream.synchronize().unwrap();
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    stream.begin_capture(mode).unwrap();
    step();
    let flags = sys::CUgraphInstantiate_flags(0);
    stream.end_capture(flags).unwrap().expect("a graph")
}

/// LayerNorm and RmsNorm have no state, so that a replay differs from the step in nothing.
#[test]
fn row_norms_replay_as_a_cuda_graph() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (device, gpu) = capturable();
    let _uploads = device.enable_cuda_graph_htod_cache();
    // The wide rows take a launch of their own for their statistics.
    for cols in [48, 16392] {
        let shape = [9, cols];
        for row_norm in RowNorm::both(&mut Data::on(&gpu, 17), cols, DType::F32) {
            let mut data = Data::on(&gpu, 18);
            let mut next = || Batch::random(&mut data, &shape, DType::F32, false);
            let first = next();
            let inputs = [&first.xs, &first.dy].map(|tensor| Var::from_tensor(tensor).unwrap());
            let [xs, dy] = inputs.each_ref().map(Var::as_detached_tensor);
            let batch = Batch::new(xs, dy);
            // A first step loads kernels.
            let outputs = row_norm.run(&batch);
            let outputs = outputs
                .iter()
                .map(|output| Var::from_tensor(output).unwrap());
            let outputs: Vec<Var> = outputs.collect();
            let step = || {
                for (output, tensor) in outputs.iter().zip(row_norm.run(&batch)) {
                    output.set(&tensor).unwrap();
                }
            };
            step();
            let graph = capture(&device, step);
            for replay in 1..=3 {
                let new = next();
                inputs[0].set(&new.xs).unwrap();
                inputs[1].set(&new.dy).unwrap();
                graph.launch().unwrap();
                let expected = row_norm.run(&new);
                for (k, (output, expected)) in outputs.iter().zip(&expected).enumerate() {
                    let what = format!("{} of {cols}, replay {replay}, {k}", row_norm.name);
                    assert_same_bits(&what, output, expected);
                }
            }
        }
    }
}

/// Past its warm-up a training step, forward and backward, allocates nothing that outlives it and
/// waits for nothing: recorded once, it replays on new inputs. t alone stands still, since it is
/// counted on the CPU. So it is over ranks, where the communicator's sum can be captured.
#[test]
fn a_training_step_replays_as_a_cuda_graph() {
    replay_a_step(|layer| layer);
    replay_a_step(|layer| {
        let same = Same(layer.weight().unwrap().device().clone());
        layer.with_ranks(&Ranks::new(same))
    });
}

fn replay_a_step(join: fn(PowerNorm) -> PowerNorm) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (device, gpu) = capturable();
    // candle uploads the shapes that its own kernels take. A capture finds them here.
    let _uploads = device.enable_cuda_graph_htod_cache();

    for (cols, groups) in thinned(PATHS) {
        for padded in [false, true] {
            let shape = [70, cols];
            let twin =
                || Twin::new(&mut Data::on(&gpu, 17), cols, config(groups), DType::F32).layer;
            let (captured, eager) = (join(twin()), join(twin()));
            let mut data = Data::on(&gpu, 18);
            let mut refill = |batch: &[Var; 2]| {
                let new = Batch::random(&mut data, &shape, DType::F32, false);
                batch[0].set(&new.xs).unwrap();
                batch[1].set(&new.dy).unwrap();
            };
            let zeros = |shape: &[usize]| Var::zeros(shape, DType::F32, &gpu).unwrap();
            let inputs = [zeros(&shape), zeros(&shape)];
            let [xs, dy] = inputs.each_ref().map(Var::as_detached_tensor);
            let batch = Batch::new(xs, dy);
            let batch = match padded {
                true => batch.masked(&Data::new(19).mask(70)),
                false => batch,
            };
            let outputs = [zeros(&shape), zeros(&shape), zeros(&[cols]), zeros(&[cols])];
            let step = || {
                let outcome = run(&captured, &batch, true);
                for (output, (_, tensor)) in outputs.iter().zip(outcome.tensors()) {
                    output.set(tensor).unwrap();
                }
            };
            for _ in 0..2 {
                refill(&inputs);
                step();
                run(&eager, &batch, true);
            }
            let before = state(&captured);
            same_state("before", &before, &state(&eager));

            let graph = capture(&device, step);
            // Nothing ran, but the step was counted.
            let (phi, nu, t) = before;
            let counted = t + 1;
            same_state("captured", &state(&captured), &(phi, nu, counted));

            for replay in 1..=3 {
                refill(&inputs);
                graph.launch().unwrap();
                let expected = run(&eager, &batch, true);
                let what = format!("{cols} by {groups:?}, padded {padded}, replay {replay}");
                for (output, (name, expected)) in outputs.iter().zip(expected.tensors()) {
                    assert_same_bits(&format!("{what}, {name}"), output, expected);
                }
                let (phi, nu, _) = state(&eager);
                same_state(&what, &state(&captured), &(phi, nu, counted));
            }
        }
    }
}
