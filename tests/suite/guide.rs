//! Functions of the guide for a reader to copy, with the checks that its pages leave out; and the
//! links between its pages.

use std::collections::{BTreeMap, BTreeSet};

/// The pages, by their files' names.
fn pages() -> BTreeMap<String, String> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/guide");
    let files = std::fs::read_dir(folder).expect("the guide");
    let page = |path: std::path::PathBuf| {
        let name = path.file_name()?.to_str()?.to_owned();
        Some((name, std::fs::read_to_string(path).ok()?))
    };
    let pages: BTreeMap<_, _> = files.filter_map(|file| page(file.ok()?.path())).collect();
    assert!(pages.len() > 10);
    pages
}

/// What is not code, line by line.
fn prose(page: &str) -> impl Iterator<Item = &str> {
    let mut code = false;
    page.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        !code && !fence
    })
}

/// The anchors of a page's headings, as GitHub and rustdoc make them.
fn anchors(page: &str) -> BTreeSet<String> {
    let headings = prose(page).filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| {
        let kept = |c: &char| c.is_alphanumeric() || " -_".contains(*c);
        let heading: String = heading
            .trim_start_matches('#')
            .trim()
            .chars()
            .filter(kept)
            .collect();
        heading.to_lowercase().replace(' ', "-")
    };
    headings.map(anchor).collect()
}

/// A link to a page, or within one, leads to a page and a heading that exist. What a page defines for
/// readers of the repository is defined for rustdoc in `src/lib.rs`, too.
#[test]
fn links_lead_to_pages_and_headings() {
    let pages = pages();
    let rustdoc = include_str!("../../src/lib.rs");
    let mut links = 0;
    for (name, page) in &pages {
        let text: Vec<_> = prose(page).collect();
        let text = text.join("\n");
        let inline = text
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split(')').next());
        let defined = prose(page).filter_map(|line| line.strip_prefix('[')?.split_once("]: "));
        let defined: Vec<_> = defined.collect();
        for (word, _) in &defined {
            assert!(
                rustdoc.contains(&format!("[{word}]: crate::guide")),
                "{name}: [{word}]"
            );
        }
        let targets = inline.chain(defined.iter().map(|(_, target)| *target));
        for target in targets.filter(|target| !target.contains(':')) {
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let to = match file {
                "" => page,
                file => pages
                    .get(file)
                    .unwrap_or_else(|| panic!("{name}: {target}")),
            };
            assert!(
                anchor.is_empty() || anchors(to).contains(anchor),
                "{name}: {target}"
            );
            links += 1;
        }
    }
    assert!(links > 100, "{links}");
}

/// The functions here are those of the pages, apart from spaces and commas.
#[test]
fn the_pages_have_these_functions() {
    let plain = |text: &str| text.replace([' ', '\n', ','], "");
    let here = plain(include_str!("guide.rs"));
    let pages = [
        include_str!("../../docs/guide/checkpoints.md"),
        include_str!("../../docs/guide/coming-from.md"),
        include_str!("../../docs/guide/inference.md"),
        include_str!("../../docs/guide/recipes.md"),
        include_str!("../../docs/guide/troubleshooting.md"),
    ];
    for name in [
        "forward<B: Module>(",
        "backward<B: Module>(",
        "backward(",
        "config(",
        "statistics(",
        "recalibrate_into_weights(",
        "variables(",
        "fit(",
        "rms_norm_weight(",
        "named(",
        "loaded(",
        "channels_first(",
        "finite(",
    ] {
        let start = format!("\nfn {name}");
        let page = pages.iter().find_map(|page| page.split_once(&start));
        let (_, rest) = page.unwrap_or_else(|| panic!("a page has {name}"));
        let (body, _) = rest.split_once("\n}\n").expect("its end");
        assert!(here.contains(&plain(&format!("fn {name}{body}"))), "{name}");
    }
}

mod activation_checkpointing {
    use candle::{DType, Device, Module, Result, Tensor, Var, backprop::GradStore};
    use candle_nn::{Sequential, VarBuilder, VarMap, linear, seq};
    use candle_powernorm::{Mode, PowerNormConfig, power_norm, trainable_vars};

    /// The output of all blocks, and the input of each, without a graph.
    fn forward<B: Module>(blocks: &[B], mode: &Mode, xs: &Tensor) -> Result<(Tensor, Vec<Tensor>)> {
        let _guard = mode.eval_scope();
        let (mut ys, mut inputs) = (xs.clone(), vec![]);
        for block in blocks {
            inputs.push(ys.clone());
            ys = block.forward(&ys)?.detach();
        }
        Ok((ys, inputs))
    }

    /// The gradients of each block, from the last to the first. `gradient` is that of the output.
    fn backward<B: Module>(
        blocks: &[B],
        inputs: Vec<Tensor>,
        mut gradient: Tensor,
    ) -> Result<Vec<GradStore>> {
        let mut all = vec![];
        for (block, input) in blocks.iter().zip(inputs).rev() {
            let input = Var::from_tensor(&input)?;
            let gradients = (block.forward(&input)? * &gradient)?
                .sum_all()?
                .backward()?;
            gradient = gradients
                .get(&input)
                .expect("the input is a variable")
                .detach();
            all.push(gradients);
        }
        Ok(all)
    }

    #[test]
    fn has_the_bits_and_the_gradients_of_one_step() -> Result<()> {
        let (mode, varmap) = (Mode::train(), VarMap::new());
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
        let block = |vb: VarBuilder| -> Result<Sequential> {
            let config = PowerNormConfig {
                warmup_steps: 1,
                ..Default::default()
            };
            let norm = power_norm(4, config, vb.pp("norm"))?.with_mode(&mode);
            Ok(seq().add(norm).add(linear(4, 4, vb.pp("linear"))?))
        };
        let blocks = [block(vb.pp(0))?, block(vb.pp(1))?];
        let xs = Tensor::randn(0f32, 1., (16, 4), &Device::Cpu)?;
        blocks[1].forward(&blocks[0].forward(&xs)?)?; // the warm-up's only step
        // The state before the step, for the step without a recomputation.
        let states: Vec<_> = varmap
            .all_vars()
            .iter()
            .map(|v| Ok((v.clone(), v.as_detached_tensor().copy()?)))
            .collect::<Result<_>>()?;

        let (ys, inputs) = forward(&blocks, &mode, &xs)?;
        // The loss is Σ y²/2.
        let all = backward(&blocks, inputs, ys.clone())?;
        for (var, value) in states {
            var.set(&value)?;
        }
        let once = blocks[1].forward(&blocks[0].forward(&xs)?)?;
        assert_eq!(once.to_vec2::<f32>()?, ys.to_vec2::<f32>()?); // the same bits
        let expected = (once.sqr()?.sum_all()? / 2.)?.backward()?;
        for var in trainable_vars(&varmap) {
            let got = all
                .iter()
                .find_map(|gradients| gradients.get(&var))
                .expect("a gradient");
            let expected = expected.get(&var).expect("a gradient");
            let largest = expected.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
            let error = (got - expected)?
                .abs()?
                .flatten_all()?
                .max(0)?
                .to_scalar::<f32>()?;
            assert!(
                largest > 0. && error <= 1e-5 * largest,
                "{error} of {largest}"
            );
        }
        Ok(())
    }
}

mod micro_batches {
    use candle::{DType, Device, Module, Result, Tensor, Var, backprop::GradStore};
    use candle_nn::{AdamW, Optimizer, VarBuilder, VarMap, linear};
    use candle_powernorm::{Mode, PowerNormConfig, power_norm, trainable_vars};

    /// Rows, and a mask of 1 for each that is kept and 0 for padding.
    type Part = (Tensor, Tensor);

    /// The mean loss over the kept rows of a batch, and its gradients, for the optimizer's step. `sum`
    /// adds up the loss over those of a part.
    fn backward(
        parts: &[Part],
        vars: &[Var],
        sum: impl Fn(&Part) -> Result<Tensor>,
    ) -> Result<(f32, GradStore)> {
        let mut kept = 0.;
        for (_, keep) in parts {
            kept += keep.to_dtype(DType::F64)?.sum_all()?.to_scalar::<f64>()?;
        }
        let (mut loss, mut sums) = (0., GradStore::default());
        for part in parts {
            let share = (sum(part)? / kept.max(1.))?;
            loss += share.to_scalar::<f32>()?;
            let mut gradients = share.backward()?;
            for var in vars {
                if let Some(gradient) = gradients.remove(var) {
                    let sum = match sums.remove(var) {
                        Some(sum) => (sum + gradient)?,
                        None => gradient,
                    };
                    sums.insert(var, sum);
                }
            }
        }
        Ok((loss, sums))
    }

    fn config(k: usize) -> PowerNormConfig {
        let alpha = 0.9f64.powf(1. / k as f64);
        let warmup_steps = k * 50; // the learning rate's warm-up has 50 steps
        PowerNormConfig {
            alpha_fwd: alpha,
            alpha_bwd: alpha,
            warmup_steps,
            ..Default::default()
        }
    }

    /// A batch in k parts. Every seventh row is padding.
    fn parts(rows: usize, k: usize) -> Result<Vec<Part>> {
        let xs = Tensor::randn(0f32, 1., (rows, 8), &Device::Cpu)?;
        let keep: Vec<_> = (0..rows).map(|row| u8::from(row % 7 != 6)).collect();
        let keep = Tensor::from_vec(keep, rows, &Device::Cpu)?;
        Ok(xs.chunk(k, 0)?.into_iter().zip(keep.chunk(k, 0)?).collect())
    }

    #[test]
    fn have_the_gradients_of_their_batch() -> Result<()> {
        let k = 4;
        let (mode, varmap) = (Mode::train(), VarMap::new());
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
        let norm = power_norm(32, config(k), vb.pp("norm"))?.with_mode(&mode);
        let (input, output) = (
            linear(8, 32, vb.pp("input"))?,
            linear(32, 1, vb.pp("output"))?,
        );
        let sum = |(xs, keep): &Part| -> Result<Tensor> {
            let ys = output.forward(&norm.forward_masked(&input.forward(xs)?, keep)?)?;
            let squares = (ys - xs.sum_keepdim(1)?)?.sqr()?.squeeze(1)?;
            (squares * keep.to_dtype(DType::F32)?)?.sum_all()
        };

        let vars = trainable_vars(&varmap);
        let mut optimizer = AdamW::new_lr(vars.clone(), 1e-2)?;
        let (batch, mut losses) = (parts(66, k)?, vec![]);
        for step in 1..=100 {
            optimizer.set_learning_rate(1e-2 * (step as f64 / 50.).min(1.));
            let (loss, gradients) = backward(&batch, &vars, sum)?;
            optimizer.step(&gradients)?;
            losses.push(loss);
        }
        assert_eq!(norm.steps()?, 100 * k);
        assert!(losses[99] < 0.1 * losses[0]);

        // An evaluation treats each row by itself, so there parts have the gradients of their batch.
        mode.set_training(false);
        for rows in [66, 10, 9] {
            let batch = parts(rows, k)?;
            let (xs, keep): (Vec<_>, Vec<_>) = batch.iter().cloned().unzip();
            let whole = [(Tensor::cat(&xs, 0)?, Tensor::cat(&keep, 0)?)];
            let (_, gradients) = backward(&batch, &vars, sum)?;
            let (_, expected) = backward(&whole, &vars, sum)?;
            for var in &vars {
                let [got, expected] = [&gradients, &expected].map(|of| of.get(var).unwrap());
                let largest = expected.abs()?.max_all()?.to_scalar::<f32>()?;
                let error = (got - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
                assert!(error < 1e-4 * largest);
            }
        }
        Ok(())
    }
}

mod frozen_statistics {
    use candle::{DType, Device, Module, Result, Tensor};
    use candle_nn::{AdamW, Optimizer, VarBuilder, VarMap};
    use candle_powernorm::{Mode, power_norm, trainable_vars};

    #[test]
    fn stay_while_parameters_move() -> Result<()> {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
        let norm = power_norm(4, 1e-5, vb.pp("norm"))?.with_mode(&Mode::eval());
        let xs = Tensor::randn(0f32, 1., (16, 4), &Device::Cpu)?;
        let mut optimizer = AdamW::new_lr(trainable_vars(&varmap), 1e-2)?;
        optimizer.backward_step(&norm.forward(&xs)?.sqr()?.mean_all()?)?;
        assert_eq!(norm.steps()?, 0);
        assert_eq!(norm.running_phi()?.to_vec1::<f32>()?, [1.; 4]);
        assert_ne!(norm.weight().unwrap().to_vec1::<f32>()?, [1.; 4]);
        Ok(())
    }
}

mod statistics_of_a_step {
    use candle::{DType, Device, Module, Result, Tensor};
    use candle_nn::{VarBuilder, VarMap};
    use candle_powernorm::{PowerNorm, PowerNormConfig, Statistics, power_norm};

    /// ψ_B², Γ and Λ of the one training step, forward and backward, that `norm` has taken since
    /// `norm.running_phi()` and `norm.nu()` were `phi` and `nu`, under `Recipe::Paper`.
    fn statistics(norm: &PowerNorm, [phi, nu]: &[Tensor; 2]) -> Result<[Tensor; 3]> {
        let (config, t) = (norm.config(), norm.steps()?);
        let warming_up = t <= config.warmup_steps;
        let old = if warming_up {
            1. - 1. / t as f64
        } else {
            config.alpha_fwd
        };
        let batch_phi = ((norm.running_phi()? - (phi * old)?)? / (1. - old))?;
        let by_batch = warming_up || config.statistics == Statistics::Batch;
        let divisor = if by_batch { &batch_phi } else { phi };
        let gamma = (&batch_phi / (divisor + config.eps)?)?;
        let factor = gamma.affine(config.alpha_bwd - 1., 1.)?.relu()?;
        let lambda = ((norm.nu()? - (nu * factor)?)? / (1. - config.alpha_bwd))?;
        Ok([batch_phi, gamma, lambda])
    }

    #[test]
    fn follow_from_the_state() -> Result<()> {
        let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
        let config = PowerNormConfig {
            group_scaling: None,
            warmup_steps: 1,
            ..Default::default()
        };
        let norm = power_norm(8, config, vb)?;
        for _ in 0..3 {
            let xs = Tensor::randn(0f32, 1., (64, 8), &Device::Cpu)?;
            let before = [norm.running_phi()?, norm.nu()?];
            let ys = norm.forward(&xs)?;
            ys.sqr()?.mean_all()?.backward()?;
            let [batch_phi, gamma, lambda] = statistics(&norm, &before)?;

            // The loss is Σ y²/n with y = x̂, so g = 2 x̂/n, and Λ is 2/n times the mean of x̂².
            let n = ys.elem_count() as f64;
            for (got, expected) in [
                (batch_phi, xs.sqr()?.mean(0)?),
                (gamma, ys.sqr()?.mean(0)?),
                ((lambda * n)?, (ys.sqr()?.mean(0)? * 2.)?),
            ] {
                let error = (got - expected)?.abs()?.max(0)?.to_scalar::<f32>()?;
                assert!(error < 1e-4);
            }
        }
        Ok(())
    }
}

mod recalibration_into_weights {
    use candle::{DType, Device, Module, Result, Tensor};
    use candle_nn::{VarBuilder, VarMap, linear_no_bias};
    use candle_powernorm::{Mode, power_norm};
    use std::collections::HashMap;

    /// Recalibrates by `run`, which runs the model on some batches, without a change of its outputs.
    /// All layers that follow `mode` must be in the map with a `weight` of their own, and have this ε.
    /// Give frozen layers another `Mode`. Keep γ in `F32`, since each round rounds it.
    fn recalibrate_into_weights(
        varmap: &VarMap,
        mode: &Mode,
        eps: f64,
        run: impl Fn() -> Result<()>,
    ) -> Result<()> {
        let mut before = HashMap::new();
        for (name, var) in varmap.data().lock().unwrap().iter() {
            if let Some(layer) = name.strip_suffix("running_phi") {
                // By the variable: a layer that has several names in the map is scaled once.
                let entry = (
                    layer.to_owned(),
                    var.clone(),
                    var.as_detached_tensor().copy()?,
                );
                before.insert(var.id(), entry);
            }
        }
        {
            let _guard = mode.recalibrate_scope();
            run()?;
        }
        let vars = varmap.data().lock().unwrap();
        for (layer, phi, old) in before.into_values() {
            let weight = &vars[&format!("{layer}weight")];
            let ratio = ((phi.as_detached_tensor() + eps)? / (old + eps)?)?;
            let factor = ratio.sqrt()?.flatten_all()?.to_dtype(weight.dtype())?;
            weight.set(&(weight.as_detached_tensor() * factor)?)?;
        }
        Ok(())
    }

    #[test]
    fn keeps_the_outputs() -> Result<()> {
        let (mode, varmap) = (Mode::eval(), VarMap::new());
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
        let norm1 = power_norm(3, 1e-5, vb.pp("norm1"))?.with_mode(&mode);
        let norm2 = power_norm(3, 1e-5, vb.pp("norm2"))?.with_mode(&mode);
        let linear = linear_no_bias(3, 3, vb.pp("linear"))?;
        for tensor in ["weight", "running_phi"] {
            // A second name of the last layer, as if the model shared it.
            let mut vars = varmap.data().lock().unwrap();
            let var = vars[&format!("norm2.{tensor}")].clone();
            vars.insert(format!("norm3.{tensor}"), var);
        }
        let model = |xs: &Tensor| norm2.forward(&(xs + linear.forward(&norm1.forward(xs)?)?)?);

        let xs = Tensor::new(&[[1f32, -2., 3.], [2., 4., -5.]], &Device::Cpu)?;
        let before = model(&xs)?;
        for _ in 0..2 {
            recalibrate_into_weights(&varmap, &mode, 1e-5, || model(&xs).map(|_| ()))?;
        }
        let evaluated = model(&xs)?;
        mode.set_training(true);
        let trained = model(&xs)?; // a batch of other data would have another statistic
        for after in [evaluated, trained] {
            assert!((after - &before)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-5);
        }
        Ok(())
    }
}

mod least_squares {
    use candle::{DType, Device, Result, Tensor};

    /// ψ² and γ, with which `γ x / sqrt(ψ² + ε)` is nearest to y in each channel, by least squares. A
    /// channel of zeros, of which any γ is as near, gets a γ of 0.
    fn fit(xs: &Tensor, ys: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
        let (xs, ys) = (xs.to_dtype(DType::F64)?, ys.to_dtype(DType::F64)?);
        let phi = xs.sqr()?.mean(0)?;
        let slope = ((&xs * &ys)?.mean(0)? / &phi)?; // NaN in a channel of zeros
        let slope = phi.gt(0f64)?.where_cond(&slope, &slope.zeros_like()?)?;
        let weight = (slope * (&phi + eps)?.sqrt()?)?;
        Ok((phi, weight))
    }

    #[test]
    fn fit_a_layer_and_give_0_to_a_channel_of_zeros() -> Result<()> {
        let xs = Tensor::new(&[[1f64, 2., 0.], [-3., 1., 0.]], &Device::Cpu)?;
        let ys = (&xs * 0.5)?;
        let (phi, weight) = fit(&xs, &ys, 1e-5)?;
        assert_eq!(phi.to_vec1::<f64>()?, [5., 2.5, 0.]);
        assert_eq!(weight.to_vec1::<f64>()?[2], 0.);
        let again = xs.broadcast_mul(&(weight / (phi + 1e-5)?.sqrt()?)?)?;
        assert!((again - ys)?.abs()?.max_all()?.to_scalar::<f64>()? < 1e-12);
        Ok(())
    }
}

mod export {
    use candle::{DType, Device, Module, Result, Tensor};
    use candle_nn::{VarBuilder, VarMap};
    use candle_powernorm::{PowerNorm, RmsNorm, power_norm_no_bias};

    /// The weight of the RMSNorm that a PowerNorm with one group is in evaluation: γ/sqrt(ψ² + ε).
    fn rms_norm_weight(norm: &PowerNorm) -> Result<Tensor> {
        let variance = (norm.running_phi()? + norm.config().eps)?;
        norm.weight()
            .expect("a weight")
            .broadcast_div(&variance.sqrt()?)
    }

    #[test]
    fn a_power_norm_is_an_rms_norm() -> Result<()> {
        let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
        let norm = power_norm_no_bias(4, 1e-5, vb)?;
        let xs = Tensor::randn(0f32, 3., (16, 4), &Device::Cpu)?;
        norm.forward(&xs)?; // training
        norm.mode().set_training(false);

        let exported = RmsNorm::new(rms_norm_weight(&norm)?, 1e-5);
        let difference = (exported.forward(&xs)? - norm.forward(&xs)?)?
            .abs()?
            .max_all()?;
        assert!(difference.to_scalar::<f32>()? < 1e-5);
        Ok(())
    }
}

mod names {
    use candle::{DType, Device, Result, Tensor, Var};
    use candle_nn::{VarMap, ops};
    use candle_powernorm::untrained;

    fn named(vars: &[(&str, Var)]) -> VarMap {
        let named = VarMap::new();
        for (name, var) in vars {
            named
                .data()
                .lock()
                .unwrap()
                .insert((*name).to_owned(), var.clone());
        }
        named
    }

    #[test]
    fn of_variables_that_a_program_keeps() -> Result<()> {
        let weight = Var::randn(0f32, 1., (8, 4), &Device::Cpu)?;
        let alpha = Var::ones(4, DType::F32, &Device::Cpu)?;

        let named = named(&[("weight", weight.clone()), ("alpha", alpha.clone())]);

        let xs = Tensor::randn(0f32, 1., (16, 8), &Device::Cpu)?;
        let loss = |ys: Tensor| (ys * xs.narrow(1, 0, 4)?)?.mean_all();

        let ys = ops::rms_norm(&xs.matmul(&weight)?, &alpha, 1e-5)?; // candle's
        let lines: Vec<_> = untrained(&named, &loss(ys)?.backward()?)?;
        assert_eq!(lines.len(), 2);

        let ys = candle_powernorm::ops::rms_norm(&xs.matmul(&weight)?, &alpha, 1e-5)?;
        assert!(untrained(&named, &loss(ys)?.backward()?)?.is_empty());
        Ok(())
    }
}

mod checkpoint_without_surprises {
    use candle::{DType, Device, Result, Tensor, Var};
    use candle_nn::{VarBuilder, VarMap};
    use candle_powernorm::layer_norm_no_bias;
    use std::collections::HashMap;

    /// A builder of `varmap`'s variables, which creates none. They have to be of the dtype `dtype`.
    fn loaded(varmap: &VarMap, dtype: DType, device: &Device) -> VarBuilder<'static> {
        let vars = varmap.data().lock().unwrap();
        let tensors = vars
            .iter()
            .map(|(name, var)| (name.clone(), var.as_tensor().clone()));
        VarBuilder::from_tensors(tensors.collect(), dtype, device)
    }

    #[test]
    fn names_a_tensor_that_the_file_lacks() -> Result<()> {
        let device = Device::Cpu;
        let file = HashMap::from([(
            "layers.1.attn_norm.weight",
            Tensor::ones(8, DType::F32, &device)?,
        )]);
        let varmap = VarMap::new();
        for (name, tensor) in file {
            let var = Var::from_tensor(&tensor.to_dtype(DType::F32)?)?;
            varmap.data().lock().unwrap().insert(name.to_owned(), var);
        }

        let vb = loaded(&varmap, DType::F32, &device);
        assert!(layer_norm_no_bias(8, 1e-5, vb.pp("layers.1.attn_norm")).is_ok());
        let error = layer_norm_no_bias(8, 1e-5, vb.pp("layers.0.attn_norm")).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("cannot find tensor layers.0.attn_norm.weight")
        );

        // On the map itself, the first layer has a norm too.
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, &device);
        assert!(layer_norm_no_bias(8, 1e-5, vb.pp("layers.0.attn_norm")).is_ok());
        Ok(())
    }
}

mod channels {
    use candle::{DType, Device, Module, Result, Tensor};
    use candle_nn::{VarBuilder, VarMap};
    use candle_powernorm::{PowerNorm, power_norm};

    fn channels_first(norm: &PowerNorm, xs: &Tensor) -> Result<Tensor> {
        let channels_last = xs.flatten_from(2)?.transpose(1, 2)?; // [N, L, C]
        norm.forward(&channels_last)?
            .transpose(1, 2)?
            .reshape(xs.shape())
    }

    #[test]
    fn come_first_again() -> Result<()> {
        let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
        let norm = power_norm(3, 1e-5, vb.pp("norm"))?;
        let images = Tensor::randn(0f32, 1., (2, 3, 8, 8), &Device::Cpu)?;
        assert_eq!(channels_first(&norm, &images)?.dims(), [2, 3, 8, 8]);
        Ok(())
    }
}

mod first_nan {
    use candle::{DType, Result, Tensor, bail};

    /// Passes `xs` on, unless it has a value that is not finite.
    fn finite(name: &str, xs: Tensor) -> Result<Tensor> {
        // A sum is finite only if every value is. In f64, so that the sum itself does not overflow.
        let sum = xs
            .to_dtype(DType::F64)?
            .abs()?
            .sum_all()?
            .to_scalar::<f64>()?;
        if !sum.is_finite() {
            bail!("{name} is not finite: {xs}")
        }
        Ok(xs)
    }

    #[test]
    fn is_found() -> Result<()> {
        let xs = Tensor::new(&[1f32, 2.], &candle::Device::Cpu)?;
        let hidden = finite("hidden", xs.affine(2., 0.)?)?;
        assert!(finite("log", (hidden - 5.)?.log()?).is_err());
        Ok(())
    }
}

mod inverted_masks {
    use candle::{Device, Result, Tensor};

    #[test]
    fn become_masks_of_kept_rows() -> Result<()> {
        let hidden = Tensor::new(&[[0u8, 0, 1], [0, 1, 1]], &Device::Cpu)?; // 1 is hidden
        let keep = hidden.eq(0u8)?;
        assert_eq!(keep.to_vec2::<u8>()?, [[1, 1, 0], [1, 0, 0]]);

        let additive = Tensor::new(&[[[[0f32, 0., -1e4]]], [[[0., -1e4, -1e4]]]], &Device::Cpu)?;
        let keep = additive.eq(0f64)?.squeeze(1)?.squeeze(1)?; // [batch, tokens]
        assert_eq!(keep.to_vec2::<u8>()?, [[1, 1, 0], [1, 0, 0]]);
        Ok(())
    }
}

mod older_files {
    use candle::{DType, Device, Module, Result, Tensor, Var};
    use candle_nn::{VarBuilder, VarMap};
    use candle_powernorm::{PowerNorm, power_norm};
    use std::collections::HashMap;

    /// For `VarBuilder::from_varmap` with the same dtype and device. Get the tensors from
    /// `candle::safetensors::load(path, &Device::Cpu)`, or from the GPU.
    fn variables(
        tensors: HashMap<String, Tensor>,
        dtype: DType,
        device: &Device,
    ) -> Result<VarMap> {
        let varmap = VarMap::new();
        let statistics = if dtype == DType::F64 {
            dtype
        } else {
            DType::F32
        };
        for (name, tensor) in tensors {
            let statistic = name.ends_with("running_phi") || name.ends_with("ema_gz");
            // A `VarMap` returns a tensor as it is, whatever dtype and device its builder asks for.
            let tensor = match tensor.dtype().is_float() {
                true if statistic => tensor.to_dtype(statistics)?.to_device(device)?,
                true => tensor.to_dtype(dtype)?.to_device(device)?,
                false => tensor.to_device(&Device::Cpu)?, // `iters` and `groups`, wherever the rest is
            };
            // The names in bert-base-uncased. A model that is saved with them would not load them into
            // a fresh map, whose names are `weight` and `bias`.
            let name = name.replace("LayerNorm.gamma", "LayerNorm.weight");
            let name = name.replace("LayerNorm.beta", "LayerNorm.bias");
            varmap
                .data()
                .lock()
                .unwrap()
                .insert(name, Var::from_tensor(&tensor)?);
        }
        Ok(varmap)
    }

    fn layer(varmap: &VarMap, dtype: DType) -> Result<PowerNorm> {
        let vb = VarBuilder::from_varmap(varmap, dtype, &Device::Cpu);
        power_norm(4, 1e-5, vb.pp("LayerNorm"))
    }

    /// bert-base-uncased's names, and every float in half precision, statistics too.
    #[test]
    fn are_read_whatever_their_names_and_dtypes() -> Result<()> {
        let trained = VarMap::new();
        let norm = layer(&trained, DType::F32)?;
        for _ in 0..3 {
            let xs = Tensor::randn(0f32, 3., (16, 4), &Device::Cpu)?;
            norm.forward(&xs)?.sqr()?.sum_all()?.backward()?;
        }
        for half in [DType::F16, DType::BF16] {
            let mut tensors = HashMap::new();
            for (name, var) in trained.data().lock().unwrap().iter() {
                let tensor = var.as_detached_tensor();
                let float = tensor.dtype().is_float();
                let tensor = if float {
                    tensor.to_dtype(half)?
                } else {
                    tensor
                };
                let name = name.replace("weight", "gamma").replace("bias", "beta");
                tensors.insert(name, tensor);
            }
            for dtype in [DType::F32, DType::F64, half] {
                let varmap = variables(tensors.clone(), dtype, &Device::Cpu)?;
                let loaded = layer(&varmap, dtype)?;
                assert_eq!(varmap.all_vars().len(), 6);
                assert_eq!(loaded.steps()?, 3);
                for (got, name) in [
                    (loaded.weight().expect("a weight").clone(), "gamma"),
                    (loaded.running_phi()?, "running_phi"),
                ] {
                    let expected = tensors[&format!("LayerNorm.{name}")].flatten_all()?;
                    let [got, expected] =
                        [got, expected].map(|t| t.to_dtype(DType::F64)?.to_vec1::<f64>());
                    assert_eq!(got?, expected?, "{name}");
                }
                let xs = Tensor::randn(0f32, 3., (16, 4), &Device::Cpu)?.to_dtype(dtype)?;
                loaded.forward(&xs)?; // it trains on
                assert_eq!(loaded.steps()?, 4);
            }
        }
        Ok(())
    }
}
