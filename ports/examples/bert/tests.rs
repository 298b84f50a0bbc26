//! What the program and the guide's page on porting say of it.

use super::*;
use tempfile::TempDir;

const LINES: [&str; 10] = [
    "The baker opens his shop.",
    "The baker sells warm bread, and the children eat it in the garden.",
    "fn main() -> Result<()> {",
    "Tea is on the table.",
    "let ids = lines.iter().flat_map(padded).collect();",
    "A girl counts the ducks on the lake.",
    "for (name, var) in vars.iter().filter(|(name, _)| name.ends_with(\"iters\")) {",
    "The bus leaves at ten o'clock.",
    "mod tests;",
    "return Ok(())",
];

fn lines() -> Vec<Line> {
    let line = |text: &str| Line::new(text, u32::from(text.ends_with(['{', ';', ')'])));
    LINES.into_iter().map(line).collect()
}

fn texts() -> Lines {
    Lines {
        classes: vec!["English".to_owned(), "Rust".to_owned()],
        training: lines(),
        held_out: lines(),
    }
}

fn checkpoint() -> Result<TempDir> {
    let folder = tempfile::tempdir()?;
    checkpoint::write(folder.path())?;
    Ok(folder)
}

/// A checkpoint whose configuration has no dropout.
fn without_dropout() -> Result<TempDir> {
    let folder = checkpoint()?;
    let path = folder.path().join("config.json");
    let text = fs::read_to_string(&path)?;
    let text = text.replace(
        "\"hidden_dropout_prob\": 0.1",
        "\"hidden_dropout_prob\": 0.0",
    );
    fs::write(path, text)?;
    Ok(folder)
}

fn power_norm_model(folder: &Path, varmap: &VarMap, mode: &Mode) -> Result<Classifier> {
    let vb = VarBuilder::from_varmap(varmap, DType::F32, &Device::Cpu);
    let norms = PowerNormBuilder::new(1e-5, mode);
    Classifier::new(with_power_norm, folder, vb, &norms, 2)
}

fn values(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let distances = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    distances.fold(0., f32::max)
}

/// bert-base-uncased's file has 206 tensors of 110,106,428 numbers.
#[test]
fn the_checkpoint_has_the_shapes_of_bert_base() {
    let shapes = checkpoint::shapes(&bert::Config::default());
    assert_eq!(shapes.len(), 206);
    let numbers = shapes
        .iter()
        .map(|(_, shape)| shape.iter().product::<usize>());
    assert_eq!(numbers.sum::<usize>(), 110_106_428);
}

/// A `VarMap` makes what a model asks for, so a fresh one shows whether the names are the file's.
#[test]
fn models_read_every_tensor_and_no_other() -> Result<()> {
    let folder = checkpoint()?;
    let loaded = names(&load(folder.path())?);
    let statistics = ["running_phi", "ema_gz", "iters", "groups"];
    for (build, norms) in [
        (untouched as Build, 0),
        (with_layer_norm, 0),
        (with_power_norm, 5),
    ] {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
        let builder = PowerNormBuilder::new(1e-5, &Mode::train());
        Classifier::new(build, folder.path(), vb, &builder, 2)?;
        let (of_norms, mut asked): (HashSet<_>, HashSet<_>) = names(&varmap)
            .into_iter()
            .partition(|name| statistics.iter().any(|of| name.ends_with(of)));
        assert_eq!(of_norms.len(), 4 * norms);
        assert!(asked.remove("classifier.weight") && asked.remove("classifier.bias"));
        assert_eq!(asked, loaded);
    }
    Ok(())
}

/// The untouched model trains what comes after its last LayerNorm.
#[test]
fn candles_layer_norm_leaves_the_encoder_untrained() -> Result<()> {
    let folder = checkpoint()?;
    let tuned = fine_tune(untouched, folder.path(), &texts(), 40)?;
    let frozen: HashSet<_> = (tuned.untrained.iter())
        .filter(|variable| matches!(variable, Untrained::NoGradient { .. }))
        .map(|variable| variable.name().to_owned())
        .collect();
    let mut expected = names(&tuned.varmap);
    expected.retain(|name| name.starts_with("bert.e"));
    assert_eq!((frozen.len(), tuned.variables), (37, 41));
    assert_eq!(frozen, expected);
    Ok(())
}

#[test]
fn with_this_crates_layers_everything_trains() -> Result<()> {
    let folder = checkpoint()?;
    for build in [with_layer_norm as Build, with_power_norm] {
        let tuned = fine_tune(build, folder.path(), &texts(), 80)?;
        assert_eq!((tuned.untrained, tuned.variables), (vec![], 41));
        assert!(tuned.losses[2] < 0.8 * tuned.losses[0]);
    }
    Ok(())
}

/// Two evaluations run in between, and they are no steps.
#[test]
fn steps_are_those_of_training() -> Result<()> {
    let folder = checkpoint()?;
    let tuned = fine_tune(with_power_norm, folder.path(), &texts(), 40)?;
    let steps: Vec<_> = tuned.steps()?.into_values().collect();
    assert_eq!(steps, [40; 5]);
    assert_eq!(tuned.new.len(), 2 + 5 * 4);
    Ok(())
}

#[test]
fn a_file_has_the_whole_model() -> Result<()> {
    let folder = checkpoint()?;
    let tuned = fine_tune(with_power_norm, folder.path(), &texts(), 40)?;
    let file = folder.path().join("fine-tuned.safetensors");
    tuned.varmap.save(&file)?;
    assert_eq!(
        evaluate(&file, folder.path(), &texts())?,
        tuned.accuracies[1]
    );
    Ok(())
}

/// Padding moves neither outputs nor statistics. 1e-5 is far above the rounding of sums in another
/// order.
#[test]
fn padding_changes_nothing() -> Result<()> {
    let folder = without_dropout()?;
    let results = [0, 9].map(|more| -> Result<_> {
        let varmap = load(folder.path())?;
        let mode = Mode::train();
        let model = power_norm_model(folder.path(), &varmap, &mode)?;
        // The same head for both: a fresh one is random.
        for of in ["weight", "bias"] {
            let var = varmap.data().lock().unwrap()[&format!("classifier.{of}")].clone();
            let ramp = Tensor::arange(0f32, var.elem_count() as f32, &Device::Cpu)?;
            var.set(&(ramp.reshape(var.shape())? / 64.)?)?;
        }
        let lines = &lines()[3..6];
        let tokens = lines.iter().map(|line| line.ids.len()).max().unwrap() + more;
        let batch = Batch::padded(lines, tokens)?;
        let mut found = values(&model.forward(&batch)?)?;
        mode.set_training(false);
        found.extend(values(&model.forward(&batch)?)?);
        let vars = varmap.data().lock().unwrap();
        let mut statistics: Vec<_> = (vars.iter())
            .filter(|(name, _)| name.ends_with("running_phi"))
            .collect();
        statistics.sort_by_key(|(name, _)| *name);
        for (_, phi) in statistics {
            found.extend(values(phi)?);
        }
        Ok(found)
    });
    let [short, long] = results;
    let distance = distance(&short?, &long?);
    assert!(distance < 1e-5, "{distance}");
    Ok(())
}

/// candle's `bert.rs` has none: the patch brings it.
#[test]
fn dropout_drops_in_training_only() -> Result<()> {
    let folder = checkpoint()?;
    let varmap = load(folder.path())?;
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let mode = Mode::train();
    let bert = with_power_norm(folder.path(), vb, &PowerNormBuilder::new(1e-5, &mode))?;
    let batch = Batch::of(&lines())?;
    let output = || values(&bert(&batch.ids, &batch.ids.zeros_like()?, &batch.mask)?);
    assert!(distance(&output()?, &output()?) > 0.1);
    mode.set_training(false);
    assert_eq!(output()?, output()?);
    Ok(())
}

/// What the guide quotes is in the program and in the patches, apart from indentation.
#[test]
fn the_guide_quotes_the_program() {
    let page = include_str!("../../../docs/guide/coming-from.md");
    let section = page.split_once("\n## BERT, from").expect("a section").1;
    let section = section.split("\n## ").next().unwrap_or(section);
    let patches = [
        include_str!("../../bert_layer_norm.patch"),
        include_str!("../../bert.patch"),
    ];
    let trimmed = |text: &str| text.lines().map(str::trim).collect::<Vec<_>>().join("\n");
    for (language, source) in [
        ("rust,ignore", trimmed(include_str!("main.rs"))),
        ("diff", trimmed(&patches.concat())),
    ] {
        let fence = format!("```{language}\n");
        let blocks = section.split(&fence).skip(1);
        let quotes: Vec<_> = blocks
            .filter_map(|block| block.split("```").next())
            .collect();
        assert!(!quotes.is_empty());
        for quote in quotes {
            assert!(source.contains(&trimmed(quote)), "{quote}");
        }
    }
}
