//! Arrays of more than 2^31 elements, of which only the ends are looked at: the memory in between is never
//! touched.

use crate::launch::{BackwardBuffers, Dtype, ForwardBuffers, Pass, Vector};
use crate::pass::{mirrored, run};
use crate::{Array, Order, Schedule};
use candle::{DType, Device, Result, Tensor};
use candle_powernorm::PowerNormConfig;
use half::f16;

/// Memory that takes room where it is touched only. Nothing may be touched past its end.
struct Reserved {
    start: *mut u8,
    mapped: usize,
}

impl Reserved {
    const PAGE: usize = 4096;

    /// `len` bytes, whole pages.
    fn new(len: usize) -> Self {
        assert!(len.is_multiple_of(Self::PAGE));
        let mapped = len + Self::PAGE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a fresh mapping, of which the last page is closed.
        let start = unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let start = libc::mmap(std::ptr::null_mut(), mapped, access, flags, -1, 0);
            assert_ne!(start, libc::MAP_FAILED);
            libc::mprotect(start.add(len), Self::PAGE, libc::PROT_NONE);
            start.cast()
        };
        Self { start, mapped }
    }

    fn address(&self) -> u64 {
        self.start as u64
    }

    /// `len` values from element `first` on.
    fn values(&mut self, first: usize, len: usize) -> &mut [f16] {
        assert!(2 * (first + len) <= self.mapped - Self::PAGE);
        // SAFETY: inside the mapping; a mapping starts as zeros.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast::<f16>().add(first), len) }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`.
        unsafe { libc::munmap(self.start.cast(), self.mapped) };
    }
}

/// An evaluation and its input gradient, with and without a layer-scale: the last rows fare as they do alone.
#[test]
fn rows_beyond_two_to_the_31() -> Result<()> {
    let (rows, cols) = ((1 << 21) + 6, 1024);
    for groups in [None, Some(1), Some(16)] {
        let config = PowerNormConfig {
            group_scaling: groups,
            affine: false,
            ..1e-5.into()
        };
        let pass = Pass {
            dtype: Dtype::F16,
            rows,
            cols,
            masked: false,
            config: mirrored(&config),
        };
        let mut arrays: [Reserved; 4] = std::array::from_fn(|_| Reserved::new(2 * rows * cols));
        let [x, dy, y, dx] = &mut arrays;
        let ends = 40 * cols;
        let last = rows * cols - ends;
        let mut arguments = crate::Arguments::random(
            &mut crate::data::Data::new(8),
            config,
            40,
            DType::F16,
            DType::F32,
            cols,
        )?;
        arguments.train = false;
        let values = |tensor: &Tensor| tensor.flatten_all()?.to_vec1::<f16>();
        x.values(last, ends).copy_from_slice(&values(&arguments.x)?);
        dy.values(last, ends)
            .copy_from_slice(&values(&arguments.dy)?);

        let phi: Vec<f32> = arguments.running_phi.to_vec1()?;
        let phi: Vec<u8> = phi.iter().flat_map(|phi| phi.to_ne_bytes()).collect();
        let phi = Array::of(&phi, 0);
        let saved = Array::unwritten(pass.saved_bytes(), 0);
        let workspace = Array::unwritten(pass.backward_workspace_bytes(), 0);
        let vector = |array: &Array| Vector {
            data: array.address(),
            dtype: Dtype::F32,
        };
        let forward = pass.forward(
            &ForwardBuffers {
                x: x.address(),
                y: y.address(),
                phi: vector(&phi),
                saved: saved.address(),
                ..Default::default()
            },
            None,
        );
        let backward = pass.backward(
            &BackwardBuffers {
                x: x.address(),
                dy: dy.address(),
                dx: dx.address(),
                ema_gz: vector(&phi),
                saved: saved.address(),
                workspace: workspace.address(),
                ..Default::default()
            },
            None,
            1.,
        );
        let schedule = Schedule {
            blocks: Order::Forward,
            threads: Order::Forward,
            seed: 0,
        };
        for launch in forward.iter().chain(&backward) {
            // The first blocks leave 1/D to the backward.
            run(launch, schedule, 0..1);
            run(launch, schedule, launch.grid.1 - 1..launch.grid.1);
        }

        let mut actual = arguments.on_cpu(DType::F32)?;
        let expected = arguments.on_cpu(DType::F32)?;
        let tail = |array: &mut Reserved| {
            Tensor::from_slice(array.values(last, ends), (40, cols), &Device::Cpu)
        };
        actual.y = tail(y)?;
        actual.dx = Some(tail(dx)?);
        arguments.compare(&format!("{groups:?} groups"), &[actual], &expected)?;
    }
    Ok(())
}
