//! The configuration as JSON, as a model's config file has it.

use candle::{DType, Device};
use candle_nn::{VarBuilder, VarMap};
use candle_powernorm::{PowerNormConfig, Recipe, Statistics, power_norm};
use serde_json::{Value, from_value, json, to_value};

fn read(json: Value) -> serde_json::Result<PowerNormConfig> {
    from_value(json)
}

/// Every field away from its default.
const OTHER: PowerNormConfig = PowerNormConfig {
    eps: 1e-6,
    alpha_fwd: 0.95,
    alpha_bwd: 0.85,
    warmup_steps: 4000,
    group_scaling: Some(8),
    statistics: Statistics::Batch,
    recipe: Recipe::Fairseq,
    affine: false,
    bias: false,
};

#[test]
fn every_field_has_its_name_and_value() {
    let json = json!({
        "eps": 1e-6,
        "alpha_fwd": 0.95,
        "alpha_bwd": 0.85,
        "warmup_steps": 4000,
        "group_scaling": 8,
        "statistics": "batch",
        "recipe": "fairseq",
        "affine": false,
        "bias": false,
    });
    assert_eq!(to_value(OTHER).unwrap(), json);
    assert_eq!(read(json).unwrap(), OTHER);

    let default = to_value(PowerNormConfig::default()).unwrap();
    assert_eq!(default["statistics"], "running");
    assert_eq!(default["recipe"], "paper");
    assert_eq!(read(default).unwrap(), PowerNormConfig::default());
}

#[test]
fn missing_fields_have_their_defaults() {
    assert_eq!(read(json!({})).unwrap(), PowerNormConfig::default());
    let expected = PowerNormConfig {
        warmup_steps: 0,
        ..Default::default()
    };
    assert_eq!(read(json!({ "warmup_steps": 0 })).unwrap(), expected);
}

/// Unlike a missing field, which means one group.
#[test]
fn null_is_no_group_scaling() {
    let none = PowerNormConfig {
        group_scaling: None,
        ..Default::default()
    };
    assert_eq!(read(json!({ "group_scaling": null })).unwrap(), none);
    assert_eq!(to_value(none).unwrap()["group_scaling"], Value::Null);
    assert_eq!(read(to_value(none).unwrap()).unwrap(), none);
}

#[test]
fn what_is_no_configuration_is_rejected() {
    for (json, reason) in [
        (json!({ "alpha_fw": 0.5 }), "unknown field `alpha_fw`"),
        (json!({ "recipe": "Paper" }), "unknown variant `Paper`"),
        (json!({ "warmup_steps": -1 }), "invalid value: integer `-1`"),
        (json!({ "eps": null }), "invalid type: null"),
        (json!(1e-5), "invalid type: floating point"),
    ] {
        let error = read(json.clone()).expect_err(&json.to_string());
        assert!(error.to_string().contains(reason), "{json}: {error}");
    }
}

/// The range of a value depends on the layer: it is checked there.
#[test]
fn values_are_checked_by_the_layer() {
    let config = read(json!({ "alpha_fwd": 1.5 })).unwrap();
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    let error = power_norm(8, config, vb).unwrap_err().to_string();
    let expected = "expected alpha_fwd between 0 and 1";
    assert!(error.contains(expected), "{error}");
}

/// A model may keep the layer's fields among its own.
#[test]
fn flattened_into_a_models_configuration() {
    #[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
    struct Config {
        hidden_size: usize,
        #[serde(flatten)]
        norm: PowerNormConfig,
    }
    let json =
        json!({ "hidden_size": 512, "vocab_size": 8, "group_scaling": null, "recipe": "fairseq" });
    let config: Config = from_value(json).unwrap();
    let norm = PowerNormConfig {
        group_scaling: None,
        recipe: Recipe::Fairseq,
        ..Default::default()
    };
    assert_eq!((config.hidden_size, config.norm), (512, norm));
    let again: Config = from_value(to_value(&config).unwrap()).unwrap();
    assert_eq!(again, config);
}
