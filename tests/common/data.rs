//! Seeded data, and the dtypes it comes in.

use candle::{DType, Device, Tensor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

pub const CPU: Device = Device::Cpu;

/// Dtypes of the input and of the builder, which parameters and state follow.
pub const DTYPES: [(DType, DType); 7] = [
    (DType::F32, DType::F32),
    (DType::F64, DType::F64),
    (DType::F64, DType::F32),
    (DType::F16, DType::F16),
    (DType::F16, DType::F32),
    (DType::BF16, DType::BF16),
    (DType::BF16, DType::F32),
];

/// The unit roundoff and the smallest normal number of a float dtype.
pub fn precision(dtype: DType) -> (f64, f64) {
    match dtype {
        DType::F64 => (2f64.powi(-53), f64::MIN_POSITIVE),
        DType::F32 => (2f64.powi(-24), 2f64.powi(-126)),
        DType::F16 => (2f64.powi(-11), 2f64.powi(-14)),
        DType::BF16 => (2f64.powi(-8), 2f64.powi(-126)),
        other => panic!("no tolerance for {other:?}"),
    }
}

/// The least number that rounds to infinity: half a unit beyond the largest.
pub fn overflow(dtype: DType) -> f64 {
    let past = match dtype {
        DType::F64 => return f64::INFINITY,
        DType::F16 => 2f64.powi(16),
        _ => 2f64.powi(128),
    };
    past * (1. - precision(dtype).0 / 2.)
}

/// The less precise of two dtypes.
pub fn coarser(a: DType, b: DType) -> DType {
    match precision(a).0 > precision(b).0 {
        true => a,
        false => b,
    }
}

/// The dtype of the sums over an input of `dtype`.
pub fn sums_of(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// A seeded source of test data, for a device: layers and batches made with it live there.
pub struct Data {
    rng: StdRng,
    device: Device,
}

impl Data {
    pub fn new(seed: u64) -> Self {
        Self::on(&CPU, seed)
    }

    pub fn on(device: &Device, seed: u64) -> Self {
        Self {
            rng: StdRng::seed_from_u64(seed),
            device: device.clone(),
        }
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Standard normal values (Box-Muller).
    pub fn normal(&mut self, len: usize) -> Vec<f64> {
        let rng = &mut self.rng;
        let mut value = || {
            let radius = (-2. * (1. - rng.random::<f64>()).ln()).sqrt();
            radius * (std::f64::consts::TAU * rng.random::<f64>()).cos()
        };
        (0..len).map(|_| value()).collect()
    }

    /// Numbers about 1.
    pub fn weight(&mut self, size: usize) -> Vec<f64> {
        self.normal(size).iter().map(|w| 1. + 0.3 * w).collect()
    }

    /// Values in `[low, high)`.
    pub fn uniform(&mut self, len: usize, low: f64, high: f64) -> Vec<f64> {
        (0..len).map(|_| self.rng.random_range(low..high)).collect()
    }

    /// A mask that keeps about two rows of three, and of two rows or more not all.
    pub fn mask(&mut self, rows: usize) -> Vec<bool> {
        (0..rows)
            .map(|row| match row {
                0 => true,
                1 => false,
                _ => self.rng.random_bool(2. / 3.),
            })
            .collect()
    }

    /// [`tensor`], on this data's device.
    pub fn tensor(&self, values: &[f64], shape: &[usize], dtype: DType) -> Tensor {
        let tensor = tensor(values, shape, dtype);
        tensor.to_device(&self.device).unwrap()
    }
}

/// `values` as a tensor of `dtype`, rounded once.
pub fn tensor(values: &[f64], shape: &[usize], dtype: DType) -> Tensor {
    let tensor = Tensor::from_slice(values, shape, &CPU).unwrap();
    tensor.to_dtype(dtype).unwrap()
}

/// `mask` as the layer takes it: 1 for a row that is kept.
pub fn keep(mask: &[bool], dims: &[usize]) -> Tensor {
    let mask: Vec<u8> = mask.iter().map(|&keep| keep.into()).collect();
    Tensor::from_vec(mask, dims, &CPU).unwrap()
}

/// The rows of `values`, `[rows, ..]`, that `mask` keeps, on the CPU.
pub fn gather(values: &Tensor, mask: &[bool]) -> Tensor {
    let rows = (0u32..).zip(mask).filter(|&(_, &keep)| keep);
    let rows: Vec<u32> = rows.map(|(row, _)| row).collect();
    let rows = Tensor::new(rows, &CPU).unwrap();
    let values = values.to_device(&CPU).unwrap();
    values.index_select(&rows, 0).unwrap()
}

/// The elements, each exactly.
pub fn to_f64(tensor: &Tensor) -> Vec<f64> {
    let tensor = tensor.detach().to_device(&CPU).unwrap();
    let tensor = tensor.to_dtype(DType::F64).unwrap();
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}
