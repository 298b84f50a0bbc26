//! The parts of every function of the library: its entry, its errors, handles.

use crate::engine::memory::lock;
use crate::engine::stream::Broken;
use crate::inject;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

/// A call's failure, as the driver numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Error(pub i32);

/// The result of a call of the driver.
pub type Outcome<T = ()> = Result<T, Error>;

/// Defines the driver's errors, whose names begin with `CUDA_ERROR_`.
macro_rules! errors {
    ($($name:ident = $number:literal,)*) => {
        impl Error {
            $(pub const $name: Self = Self($number);)*

            /// Its name, with the end that C asks for.
            pub fn name(self) -> &'static str {
                match self.0 {
                    0 => "CUDA_SUCCESS\0",
                    $($number => concat!("CUDA_ERROR_", stringify!($name), "\0"),)*
                    _ => "CUDA_ERROR_UNKNOWN\0",
                }
            }
        }
    };
}

errors! {
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_PTX = 218,
    FILE_NOT_FOUND = 301,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
    STREAM_CAPTURE_UNSUPPORTED = 900,
    STREAM_CAPTURE_INVALIDATED = 901,
    STREAM_CAPTURE_MERGE = 902,
    STREAM_CAPTURE_UNMATCHED = 903,
    STREAM_CAPTURE_UNJOINED = 904,
    STREAM_CAPTURE_ISOLATION = 905,
    STREAM_CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    STREAM_CAPTURE_WRONG_THREAD = 908,
}

impl Error {
    pub const UNKNOWN: Self = Self(999);
    /// cuRAND's alone.
    pub const ODD_LENGTH: Self = Self(-105);

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
        #[unsafe(no_mangle)]
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
    all: Mutex<BTreeMap<u64, T>>,
}

impl<T: Clone> Handles<T> {
    pub const fn new(kind: u64) -> Self {
        Self {
            kind,
            all: Mutex::new(BTreeMap::new()),
        }
    }

    pub fn add(&self, value: T) -> u64 {
        static NEXT: AtomicI64 = AtomicI64::new(1);
        let handle = self.kind << 40 | (NEXT.fetch_add(1, Relaxed) as u64) << 4;
        lock(&self.all).insert(handle, value);
        handle
    }

    pub fn get(&self, handle: u64) -> Outcome<T> {
        let found = lock(&self.all).get(&handle).cloned();
        found.ok_or(Error::INVALID_HANDLE)
    }

    pub fn remove(&self, handle: u64) -> Outcome<T> {
        let found = lock(&self.all).remove(&handle);
        found.ok_or(Error::INVALID_HANDLE)
    }

    pub fn find(&self, matches: impl Fn(&T) -> bool) -> Option<T> {
        let all = lock(&self.all);
        all.values().find(|value| matches(value)).cloned()
    }

    pub fn count(&self) -> u64 {
        self.sum(|_| 1)
    }

    pub fn sum(&self, of: impl Fn(&T) -> u64) -> u64 {
        lock(&self.all).values().map(of).sum()
    }
}
