//! Loss curves as an SVG file.

use crate::train::History;
use anyhow::{anyhow, Context, Result};
use plotters::coord::Shift;
use plotters::prelude::*;
use std::path::Path;

/// One run in a plot.
pub struct Curve {
    pub label: String,
    pub history: History,
}

/// Points that a training loss, one noisy number a step, is averaged into.
const TRAIN_POINTS: usize = 100;

const COLORS: [RGBColor; 5] = [
    RGBColor(31, 119, 180),
    RGBColor(214, 39, 40),
    RGBColor(44, 160, 44),
    RGBColor(148, 103, 189),
    RGBColor(230, 140, 20),
];

type Points = Vec<(f64, f64)>;

impl Curve {
    fn train(&self) -> Points {
        let losses = &self.history.train;
        let size = losses.len().div_ceil(TRAIN_POINTS).max(1);
        let mean = |losses: &[f32]| {
            losses.iter().map(|&l| f64::from(l)).sum::<f64>() / losses.len() as f64
        };
        losses
            .chunks(size)
            .enumerate()
            .map(|(i, chunk)| {
                (
                    i as f64 * size as f64 + chunk.len() as f64 / 2.,
                    mean(chunk),
                )
            })
            .collect()
    }

    fn val(&self) -> Points {
        let points = self.history.val.iter();
        points
            .map(|&(step, loss)| (f64::from(step), f64::from(loss)))
            .collect()
    }
}

/// Draws the training losses as thin and the validation losses as thick lines.
pub fn draw(path: &Path, curves: &[Curve]) -> Result<()> {
    let mut svg = String::new();
    let area = SVGBackend::with_string(&mut svg, (900, 560)).into_drawing_area();
    // plotters' errors borrow the drawing.
    draw_on(&area, curves).map_err(|error| anyhow!("cannot draw {}: {error}", path.display()))?;
    drop(area);
    std::fs::write(path, svg).with_context(|| format!("cannot write {}", path.display()))
}

fn draw_on<B: DrawingBackend>(
    area: &DrawingArea<B, Shift>,
    curves: &[Curve],
) -> Result<(), DrawingAreaErrorKind<B::ErrorType>> {
    let last_step = curves.iter().map(|curve| curve.history.train.len()).max();
    let last_step = last_step.unwrap_or(0).max(1) as f64;
    // The first steps fall from log(vocabulary), and would press the rest into a flat line.
    let shown = |curve: &Curve| [curve.train(), curve.val()].concat();
    let (low, high) = curves
        .iter()
        .flat_map(shown)
        .filter(|point| point.0 >= last_step / 10.)
        .map(|(_, loss)| (loss, loss))
        .reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))
        .unwrap_or((0., 1.));
    let margin = ((high - low) * 0.05).max(0.01);
    let losses = low - margin..high + margin;

    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(area)
        .caption(
            "Loss: thick on the validation split, thin in training",
            ("sans-serif", 20),
        )
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(60)
        .build_cartesian_2d(0. ..last_step, losses.clone())?;
    chart
        .configure_mesh()
        .x_desc("steps")
        .y_desc("nats per character")
        .x_label_formatter(&|step| format!("{step:.0}"))
        .y_label_formatter(&|loss| format!("{loss:.2}"))
        .light_line_style(TRANSPARENT)
        .draw()?;
    for (curve, color) in curves.iter().zip(COLORS.iter().cycle()) {
        let visible = |points: Points| points.into_iter().filter(|point| losses.contains(&point.1));
        chart.draw_series(LineSeries::new(visible(curve.train()), color.mix(0.5)))?;
        let dots = visible(curve.val()).map(|point| Circle::new(point, 3, color.filled()));
        chart.draw_series(dots)?;
        chart
            .draw_series(LineSeries::new(visible(curve.val()), color.stroke_width(2)))?
            .label(&curve.label)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], color.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE)
        .border_style(BLACK.mix(0.3))
        .label_font(("sans-serif", 15))
        .draw()?;
    area.present()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_runs_of_any_length() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("loss.svg");
        for steps in [0u16, 1, 7, 1000] {
            let history = History {
                train: (0..steps).map(|step| 4. - f32::from(step) / 1e3).collect(),
                val: (steps > 0)
                    .then_some((u32::from(steps), 3.))
                    .into_iter()
                    .collect(),
            };
            let curve = Curve {
                label: "a label".into(),
                history,
            };
            draw(&path, &[curve]).unwrap();
            let svg = std::fs::read_to_string(&path).unwrap();
            assert!(svg.contains("a label") && svg.trim_end().ends_with("</svg>"));
            assert!(!svg.contains("NaN"));
        }
    }
}
