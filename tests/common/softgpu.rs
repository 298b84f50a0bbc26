//! softgpu's own functions, which no driver has: they let calls fail, count, and switch kernels
//! off.
#![allow(dead_code)] // every program uses its share

use candle::{CudaDevice, Device};
use serde_json::Value;
use std::ffi::{CStr, c_char};
use std::mem::transmute_copy;
use std::ptr::{null, null_mut};

/// softgpu's functions, whose signatures its `testing.rs` defines.
pub struct Softgpu {
    fail: unsafe extern "C" fn(*const c_char, u64),
    calls: unsafe extern "C" fn(*const c_char) -> u64,
    live: unsafe extern "C" fn(*const c_char) -> u64,
    counts: unsafe extern "C" fn(*mut c_char, usize, bool) -> usize,
    kernels: extern "C" fn(bool),
}

impl Softgpu {
    /// Finds softgpu, or explains that the driver is another.
    pub fn find() -> Result<Self, String> {
        /// # Safety
        /// softgpu's function of this name has the type `F`.
        unsafe fn function<F>(name: &CStr) -> Result<F, String> {
            // SAFETY: the name ends with a zero.
            let function = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
            match function.is_null() {
                // SAFETY: as the caller says, this is a function of that type.
                false => Ok(unsafe { transmute_copy(&function) }),
                true => Err(format!(
                    "the driver is not softgpu: it has no {name:?}; use softgpu/run"
                )),
            }
        }
        // SAFETY: softgpu defines these functions with these signatures, in `testing.rs`.
        unsafe {
            Ok(Self {
                fail: function(c"softgpu_fail")?,
                calls: function(c"softgpu_calls")?,
                live: function(c"softgpu_live")?,
                counts: function(c"softgpu_counts")?,
                kernels: function(c"softgpu_kernels")?,
            })
        }
    }

    /// Runs `work`, whose n-th call of a function of the driver fails, or of any. (Calls that give
    /// something back do not.)
    pub fn failing<T>(
        &self,
        function: Option<&CStr>,
        device: &CudaDevice,
        n: u64,
        work: impl FnOnce() -> T,
    ) -> T {
        let name = function.map_or(null(), CStr::as_ptr);
        // SAFETY: null is for any function, and another name ends with a zero.
        unsafe { (self.fail)(name, n) };
        let result = work();
        // SAFETY: as above.
        unsafe { (self.fail)(name, 0) };
        // cudarc keeps what fails while it drops something, for the next call to report.
        let _ = device.cuda_stream().context().check_err();
        result
    }

    /// Runs `work`, and counts its calls of a function of the driver, or of all.
    pub fn counting<T>(&self, function: Option<&CStr>, work: impl FnOnce() -> T) -> (T, u64) {
        let name = function.map_or(null(), CStr::as_ptr);
        // SAFETY: null is for all functions, and another name ends with a zero.
        let calls = || unsafe { (self.calls)(name) };
        let before = calls();
        let result = work();
        (result, calls() - before)
    }

    /// The number of the driver's live objects, by kind.
    pub fn live(&self, device: &Device) -> Vec<(&'static CStr, u64)> {
        // An array that is freed in the order of a stream is there until then.
        device.synchronize().unwrap();
        [c"allocations", c"bytes", c"events", c"streams", c"modules"]
            // SAFETY: the names end with a zero.
            .map(|kind| (kind, unsafe { (self.live)(kind.as_ptr()) }))
            .to_vec()
    }

    /// The number of kernels in the modules that are loaded.
    pub fn loaded(&self) -> u64 {
        // SAFETY: the name ends with a zero.
        unsafe { (self.live)(c"entries".as_ptr()) }
    }

    /// Counts of this thread's finished work, by kernel, since the last call of this function.
    pub fn take_counts(&self) -> Value {
        // SAFETY: no text is asked for.
        let room = 1 + unsafe { (self.counts)(null_mut(), 0, false) };
        let mut text = vec![0u8; room];
        // SAFETY: the buffer has the room that is named.
        let bytes = unsafe { (self.counts)(text.as_mut_ptr().cast(), room, true) };
        serde_json::from_slice(&text[..bytes]).expect("softgpu writes JSON")
    }

    /// Switches kernels and copies on or off.
    pub fn run_kernels(&self, on: bool) {
        (self.kernels)(on);
    }
}
