//! A training run as a safetensors file: everything its future depends on.

use super::optim::AdamW;
use anyhow::{bail, Context, Result};
use candle::{Device, Tensor, Var};
use candle_nn::VarMap;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Write;
use std::path::Path;

/// Tensors and notes, under names.
#[derive(Debug, Default)]
pub struct Checkpoint {
    pub tensors: BTreeMap<String, Tensor>,
    pub notes: HashMap<String, String>,
}

impl Checkpoint {
    /// A run's settings, variables and moments.
    pub fn new(settings: &Value, varmap: &VarMap, optimizer: &AdamW) -> Self {
        let mut tensors = BTreeMap::new();
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
        ]);
        Self { tensors, notes }
    }

    /// The file is complete or not there: a crash leaves the one before.
    pub fn write(self, path: &Path) -> Result<()> {
        let bytes = safetensors::serialize(&self.tensors, Some(self.notes))?;
        write_whole(path, &bytes).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Reads the file and gives the run its variables and moments back. A run of other settings is refused.
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
