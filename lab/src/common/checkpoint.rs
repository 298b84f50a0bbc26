//! A training run as a safetensors file: everything its future depends on.

use super::optim::AdamW;
use anyhow::{Context, Result, bail};
use candle::{Device, Tensor, Var};
use candle_nn::VarMap;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

/// The losses of a run so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct History {
    /// Of every step.
    pub train: Vec<f32>,
    /// Steps made before an evaluation, and its loss.
    pub val: Vec<(u32, f32)>,
}

/// Tensors and notes, under names.
#[derive(Debug, Default)]
pub struct Checkpoint {
    pub tensors: BTreeMap<String, Tensor>,
    pub notes: HashMap<String, String>,
}

impl Checkpoint {
    /// A run's settings, variables and moments, its losses, and the time it took.
    pub fn new(
        settings: &Value,
        varmap: &VarMap,
        optimizer: &AdamW,
        history: &History,
        elapsed: Duration,
    ) -> Result<Self> {
        let cpu = &Device::Cpu;
        let (val_steps, val): (Vec<_>, Vec<_>) = history.val.iter().copied().unzip();
        let mut tensors = BTreeMap::from([
            ("history.train".into(), Tensor::new(&*history.train, cpu)?),
            ("history.val_steps".into(), Tensor::new(val_steps, cpu)?),
            ("history.val".into(), Tensor::new(val, cpu)?),
        ]);
        for (name, var) in variables(varmap) {
            tensors.insert(format!("model.{name}"), var.as_detached_tensor());
        }
        for slot in &optimizer.slots {
            tensors.insert(format!("adam.mean.{}", slot.name), slot.mean.clone());
            tensors.insert(format!("adam.square.{}", slot.name), slot.square.clone());
        }
        let notes = HashMap::from([
            ("settings".to_string(), settings.to_string()),
            ("steps".to_string(), optimizer.steps.to_string()),
            ("seconds".to_string(), elapsed.as_secs_f64().to_string()),
        ]);
        Ok(Self { tensors, notes })
    }

    /// The file is complete or not there: a crash leaves the one before.
    pub fn write(self, path: &Path) -> Result<()> {
        let bytes = safetensors::serialize(&self.tensors, Some(self.notes))?;
        write_whole(path, &bytes).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Reads the file and gives the run its variables and moments back. A run of other settings is
    /// rejected.
    pub fn restore(
        path: &Path,
        settings: &Value,
        varmap: &VarMap,
        optimizer: &mut AdamW,
    ) -> Result<Self> {
        let bytes = std::fs::read(path)?;
        let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes)?;
        let notes = metadata.metadata().clone().context("no settings in it")?;
        let tensors = candle::safetensors::load_buffer(&bytes, &Device::Cpu)?;
        let mut checkpoint = Self {
            tensors: tensors.into_iter().collect(),
            notes,
        };
        let theirs: Value = serde_json::from_str(checkpoint.note("settings")?)?;
        for (key, ours) in settings.as_object().into_iter().flatten() {
            if theirs[key] != *ours {
                bail!("its run has {key} {}, this one {ours}", theirs[key]);
            }
        }
        for (name, var) in variables(varmap) {
            let value = checkpoint.take(&format!("model.{name}"))?;
            var.set(&value.to_device(var.device())?)?;
        }
        for slot in &mut optimizer.slots {
            let device = slot.var.device();
            let mut take = |what| {
                let value = checkpoint.take(&format!("adam.{what}.{}", slot.name))?;
                anyhow::Ok(value.to_device(device)?)
            };
            (slot.mean, slot.square) = (take("mean")?, take("square")?);
        }
        optimizer.steps = checkpoint.note("steps")?.parse()?;
        Ok(checkpoint)
    }

    /// The losses, and the time.
    pub fn take_history(&mut self) -> Result<(History, Duration)> {
        let val_steps = self.take("history.val_steps")?.to_vec1()?;
        let val = self.take("history.val")?.to_vec1()?;
        let history = History {
            train: self.take("history.train")?.to_vec1()?,
            val: val_steps.into_iter().zip(val).collect(),
        };
        let elapsed = Duration::try_from_secs_f64(self.note("seconds")?.parse()?)?;
        Ok((history, elapsed))
    }

    pub fn take(&mut self, name: &str) -> Result<Tensor> {
        let tensor = self.tensors.remove(name);
        tensor.with_context(|| format!("no {name} in it"))
    }

    pub fn note(&self, key: &str) -> Result<&str> {
        let note = self.notes.get(key);
        Ok(note.with_context(|| format!("no {key} in it"))?)
    }
}

/// The variables of `varmap`, by name.
pub fn variables(varmap: &VarMap) -> BTreeMap<String, Var> {
    // No code panics while it holds this lock.
    let data = varmap
        .data()
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    data.iter()
        .map(|(name, var)| (name.clone(), var.clone()))
        .collect()
}

/// Writes beside `path` first, so that `path` is never half a file.
pub fn write_whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let partial = path.with_extension("partial");
    let mut file = File::create(&partial)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&partial, path)
}

/// Every number that a run's future depends on, as bits.
#[cfg(test)]
pub fn bits(varmap: &VarMap, optimizer: &AdamW) -> Vec<(String, Vec<u64>)> {
    let variables = variables(varmap).into_iter();
    let mut tensors: Vec<_> = variables
        .map(|(name, var)| (name, var.as_detached_tensor()))
        .collect();
    for slot in &optimizer.slots {
        tensors.push((format!("{}.mean", slot.name), slot.mean.clone()));
        tensors.push((format!("{}.square", slot.name), slot.square.clone()));
    }
    let bits = |tensor: Tensor| -> Result<Vec<u64>> {
        let values = tensor.flatten_all()?.to_dtype(candle::DType::F64)?;
        Ok(values
            .to_vec1::<f64>()?
            .into_iter()
            .map(f64::to_bits)
            .collect())
    };
    (tensors.into_iter())
        .map(|(name, tensor)| (name, bits(tensor).unwrap()))
        .collect()
}
