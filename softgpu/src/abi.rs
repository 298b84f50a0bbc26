//! The parts of every function of the library: its entry, its errors, handles.

use crate::engine::stream::Broken;
use crate::inject;
use std::collections::HashMap;
use std::ffi::CStr;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// A call's failure, as the driver numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Error(pub i32);

/// The result of a call of the driver.
pub type Outcome<T = ()> = Result<T, Error>;

impl Error {
    pub const INVALID_VALUE: Self = Self(1);
    pub const OUT_OF_MEMORY: Self = Self(2);
    pub const NOT_INITIALIZED: Self = Self(3);
    pub const INVALID_DEVICE: Self = Self(101);
    pub const INVALID_CONTEXT: Self = Self(201);
    pub const INVALID_PTX: Self = Self(218);
    pub const FILE_NOT_FOUND: Self = Self(301);
    pub const INVALID_HANDLE: Self = Self(400);
    pub const NOT_FOUND: Self = Self(500);
    pub const NOT_READY: Self = Self(600);
    pub const ILLEGAL_ADDRESS: Self = Self(700);
    pub const LAUNCH_FAILED: Self = Self(719);
    pub const NOT_SUPPORTED: Self = Self(801);
    pub const CAPTURE_UNSUPPORTED: Self = Self(900);
    pub const CAPTURE_INVALIDATED: Self = Self(901);
    pub const CAPTURE_MERGE: Self = Self(902);
    pub const CAPTURE_UNMATCHED: Self = Self(903);
    pub const CAPTURE_UNJOINED: Self = Self(904);
    pub const CAPTURE_ISOLATION: Self = Self(905);
    pub const CAPTURE_IMPLICIT: Self = Self(906);
    pub const CAPTURED_EVENT: Self = Self(907);
    pub const CAPTURE_WRONG_THREAD: Self = Self(908);
    pub const UNKNOWN: Self = Self(999);
    /// cuRAND's alone.
    pub const ODD_LENGTH: Self = Self(-105);

    /// Its name, with the end that C asks for.
    pub fn name(self) -> &'static CStr {
        match self.0 {
            0 => c"CUDA_SUCCESS",
            1 => c"CUDA_ERROR_INVALID_VALUE",
            2 => c"CUDA_ERROR_OUT_OF_MEMORY",
            3 => c"CUDA_ERROR_NOT_INITIALIZED",
            101 => c"CUDA_ERROR_INVALID_DEVICE",
            201 => c"CUDA_ERROR_INVALID_CONTEXT",
            218 => c"CUDA_ERROR_INVALID_PTX",
            301 => c"CUDA_ERROR_FILE_NOT_FOUND",
            400 => c"CUDA_ERROR_INVALID_HANDLE",
            500 => c"CUDA_ERROR_NOT_FOUND",
            600 => c"CUDA_ERROR_NOT_READY",
            700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
            719 => c"CUDA_ERROR_LAUNCH_FAILED",
            801 => c"CUDA_ERROR_NOT_SUPPORTED",
            900 => c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
            901 => c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
            902 => c"CUDA_ERROR_STREAM_CAPTURE_MERGE",
            903 => c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
            904 => c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
            905 => c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
            906 => c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
            907 => c"CUDA_ERROR_CAPTURED_EVENT",
            908 => c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
            _ => c"CUDA_ERROR_UNKNOWN",
        }
    }

    /// The number by which the library that has a function knows it.
    fn number_for(self, function: &str) -> i32 {
        if function.starts_with("cublas") {
            match self {
                Self::INVALID_VALUE => 7,
                Self::OUT_OF_MEMORY => 3,
                Self::INVALID_HANDLE | Self::INVALID_CONTEXT => 1,
                Self::NOT_SUPPORTED => 15,
                _ => 13,
            }
        } else if function.starts_with("curand") {
            match self {
                Self::OUT_OF_MEMORY => 102,
                Self::INVALID_HANDLE | Self::INVALID_CONTEXT => 101,
                Self::INVALID_VALUE => 104,
                Self::ODD_LENGTH => 105,
                _ => 201,
            }
        } else if function.starts_with("nccl") {
            match self {
                Self::INVALID_VALUE | Self::INVALID_HANDLE => 4,
                Self::NOT_SUPPORTED => 5,
                _ => 1,
            }
        } else {
            self.0
        }
    }
}

impl From<Broken> for Error {
    fn from(_: Broken) -> Self {
        Self::ILLEGAL_ADDRESS
    }
}

/// Enters a function of the library: counts the call, fails if that is asked for, and keeps panics
/// from the caller.
pub fn enter(function: &'static str, body: impl FnOnce() -> Outcome) -> i32 {
    let outcome = match inject::count(function) {
        true if function.contains("Alloc") || function.contains("Create") => {
            Err(Error::OUT_OF_MEMORY)
        }
        true => Err(Error::LAUNCH_FAILED),
        false => std::panic::catch_unwind(std::panic::AssertUnwindSafe(body))
            .unwrap_or(Err(Error::UNKNOWN)),
    };
    match outcome {
        Ok(()) => 0,
        Err(error) => error.number_for(function),
    }
}

/// Defines functions of the C interface.
macro_rules! entries {
    ($($(#[$meta:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        $(#[$meta])*
        /// # Safety
        ///
        /// As CUDA documents: handles are valid, and pointers have room for what is written
        /// there.
        #[no_mangle]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> i32 {
            $crate::abi::enter(stringify!($name), || $body)
        }
    )*};
}

pub(crate) use entries;

/// Hands a result to a C caller.
///
/// # Safety
///
/// `to` is null, or has room for a `T`.
pub unsafe fn put<T>(to: *mut T, value: T) -> Outcome {
    if to.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: as this function asks.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Handles of one kind, which are numbers that no other kind has.
pub struct Handles<T> {
    kind: u64,
    all: Mutex<Option<HashMap<u64, T>>>,
}

impl<T: Clone> Handles<T> {
    pub const fn new(kind: u64) -> Self {
        Self {
            kind,
            all: Mutex::new(None),
        }
    }

    fn with<R>(&self, f: impl FnOnce(&mut HashMap<u64, T>) -> R) -> R {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        f(all.get_or_insert_default())
    }

    pub fn add(&self, value: T) -> u64 {
        static NEXT: AtomicI64 = AtomicI64::new(1);
        let handle = self.kind << 40 | (NEXT.fetch_add(1, Relaxed) as u64) << 4;
        self.with(|all| all.insert(handle, value));
        handle
    }

    pub fn get(&self, handle: u64) -> Outcome<T> {
        self.with(|all| all.get(&handle).cloned())
            .ok_or(Error::INVALID_HANDLE)
    }

    pub fn remove(&self, handle: u64) -> Outcome<T> {
        self.with(|all| all.remove(&handle))
            .ok_or(Error::INVALID_HANDLE)
    }

    pub fn find(&self, matches: impl Fn(&T) -> bool) -> Option<T> {
        self.with(|all| all.values().find(|value| matches(value)).cloned())
    }

    pub fn count(&self) -> u64 {
        self.with(|all| all.len() as u64)
    }
}
