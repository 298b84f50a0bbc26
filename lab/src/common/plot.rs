//! Curves as an SVG file.

use super::checkpoint::History;
use anyhow::{anyhow, Context, Result};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::path::Path;

/// A set of axes with lines on it.
#[derive(Debug, Default)]
pub struct Chart {
    pub title: String,
    pub x: &'static str,
    pub y: &'static str,
    pub lines: Vec<Line>,
    /// Whether the y axis is logarithmic. Points that are not positive are then left out.
    pub logarithmic: bool,
    /// The most that the y axis shows. What is above it is marked at the upper edge, with its
    /// value.
    pub ceiling: Option<f64>,
    /// The share of the x axis, from its left, whose points do not decide what the y axis shows.
    pub settling: f64,
}

#[derive(Debug, Default)]
pub struct Line {
    /// Empty for a line that the legend leaves out.
    pub label: String,
    pub points: Vec<(f64, f64)>,
    pub style: Style,
    /// Lines of one number share a color. Numbers are of things in an order, by depth for one, if
    /// there are many.
    pub color: usize,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum Style {
    /// With a dot at each point.
    #[default]
    Thick,
    Thin,
}

/// Points that one noisy number a step is averaged into.
const MEAN_POINTS: usize = 100;

const COLORS: [RGBColor; 6] = [
    RGBColor(31, 119, 180),
    RGBColor(214, 39, 40),
    RGBColor(44, 160, 44),
    RGBColor(148, 103, 189),
    RGBColor(230, 140, 20),
    RGBColor(110, 110, 110),
];

/// Ends and middle of the shades that lines get where there are more of them than [`COLORS`]. Their
/// lightness rises, so that the order shows.
const SHADES: [RGBColor; 3] = [
    RGBColor(20, 10, 130),
    RGBColor(205, 45, 110),
    RGBColor(250, 170, 30),
];

/// The size of a chart.
const CHART: (u32, u32) = (900, 560);

/// Of one among several.
const PANEL: (u32, u32) = (520, 360);

/// The size of the letters of legends and marks, and from one mark to the next below it.
const LETTERS: i32 = 14;
const MARK_STEP: i32 = 18;

/// What a panel's legend takes beside its lines, as a share of theirs.
const LEGEND_ROOM: f64 = 0.55;

const THIN_OPACITY: f64 = 0.7;

/// One number for each step, as points of means over stretches of steps.
pub fn means(values: &[f32]) -> Vec<(f64, f64)> {
    let size = values.len().div_ceil(MEAN_POINTS).max(1);
    let mean = |values: &[f32]| {
        let sum: f64 = values.iter().map(|&value| f64::from(value)).sum();
        sum / values.len() as f64
    };
    (values.chunks(size).enumerate())
        .map(|(i, chunk)| {
            (
                i as f64 * size as f64 + chunk.len() as f64 / 2.,
                mean(chunk),
            )
        })
        .collect()
}

/// The losses of runs, each under its label: thin in training, thick on the validation split.
pub fn losses(title: String, y: &'static str, runs: &[(String, &History)]) -> Chart {
    let mut lines = vec![];
    for (color, (label, history)) in runs.iter().enumerate() {
        lines.push(Line {
            points: means(&history.train),
            style: Style::Thin,
            color,
            ..Default::default()
        });
        let val = history.val.iter();
        lines.push(Line {
            label: label.clone(),
            points: val
                .map(|&(step, loss)| (f64::from(step), f64::from(loss)))
                .collect(),
            style: Style::Thick,
            color,
        });
    }
    Chart {
        title,
        x: "steps",
        y,
        lines,
        logarithmic: false,
        ceiling: None,
        // The first steps fall from log(vocabulary), and would press the rest into a flat line.
        settling: 0.1,
    }
}

/// Draws charts, `columns` beside each other.
pub fn draw(path: &Path, charts: &[Chart], columns: usize) -> Result<()> {
    let rows = charts.len().div_ceil(columns);
    let (width, height) = if charts.len() > 1 { PANEL } else { CHART };
    let size = (width * columns as u32, height * rows as u32);
    let mut svg = String::new();
    let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
    // plotters' errors borrow the drawing.
    draw_all(&area, charts, rows, columns)
        .map_err(|error| anyhow!("cannot draw {}: {error}", path.display()))?;
    drop(area);
    std::fs::write(path, svg).with_context(|| format!("cannot write {}", path.display()))
}

type DrawingError<B> = DrawingAreaErrorKind<<B as DrawingBackend>::ErrorType>;

fn draw_all<B: DrawingBackend>(
    area: &DrawingArea<B, Shift>,
    charts: &[Chart],
    rows: usize,
    columns: usize,
) -> Result<(), DrawingError<B>> {
    area.fill(&WHITE)?;
    for (area, chart) in area.split_evenly((rows, columns)).iter().zip(charts) {
        draw_chart(area, chart, charts.len() > 1)?;
    }
    area.present()
}

fn draw_chart<B: DrawingBackend>(
    area: &DrawingArea<B, Shift>,
    chart: &Chart,
    panel: bool,
) -> Result<(), DrawingError<B>> {
    let points = || chart.lines.iter().flat_map(|line| &line.points);
    let span = |a: (f64, f64), b: (f64, f64)| (a.0.min(b.0), a.1.max(b.1));
    let ends = points().map(|point| (point.0, point.0)).reduce(span);
    let (left, right) = ends.unwrap_or((0., 1.));
    let (left, right) = match chart.settling > 0. {
        true => (0., right),
        false => (left, right),
    };
    let right = if right > left { right } else { left + 1. };
    // A small chart has no corner free for the legend.
    let legend = chart.lines.iter().any(|line| !line.label.is_empty());
    let room = if panel && legend {
        LEGEND_ROOM * (right - left)
    } else {
        0.
    };
    let from = left + (right - left) * chart.settling;
    let shown = |value: f64| match chart.logarithmic {
        true => value.log10(),
        false => value,
    };
    let above = |y: f64| chart.ceiling.is_some_and(|ceiling| y > ceiling);
    let (low, high) = (points().filter(|point| point.0 >= from && !above(point.1)))
        .map(|point| shown(point.1))
        .filter(|y| y.is_finite())
        .map(|y| (y, y))
        .reduce(span)
        .unwrap_or((0., 1.));
    let margin = ((high - low) * 0.05).max(0.01);
    let range = low - margin..high + margin;

    let mut axes = ChartBuilder::on(area)
        .caption(&chart.title, ("sans-serif", 18))
        .margin(14)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(left..right + room, range.clone())?;
    axes.configure_mesh()
        .x_desc(chart.x)
        .y_desc(chart.y)
        .x_label_formatter(&|x| number(tick(*x, right - left)))
        .y_label_formatter(&|y| match chart.logarithmic {
            true => format!("{:.1e}", 10f64.powf(*y)),
            false => number(tick(*y, high - low)),
        })
        .light_line_style(TRANSPARENT)
        .draw()?;
    let colors = chart.lines.iter().map(|line| line.color + 1).max();
    let colors = colors.unwrap_or(0);
    let mut marked: Vec<f64> = vec![];
    for line in &chart.lines {
        let color = color(line.color, colors);
        for &(x, y) in line.points.iter().filter(|point| above(point.1)) {
            // Below those that are there already.
            let others = marked.iter().filter(|&&other| other == x).count() as i32;
            let down = MARK_STEP * (others + 1);
            // Towards the middle.
            let (side, gap) = match x < (left + right) / 2. {
                true => (HPos::Left, 10),
                false => (HPos::Right, -10),
            };
            let letters = ("sans-serif", LETTERS).into_font().color(&color);
            let label = format!("{} {}", line.label, number(y));
            let mark = EmptyElement::at((x, range.end))
                + TriangleMarker::new((0, down), 5, color.filled())
                + Text::new(
                    label,
                    (gap, down),
                    letters.pos(Pos::new(side, VPos::Center)),
                );
            axes.draw_series([mark])?;
            marked.push(x);
        }
        let points: Vec<_> = (line.points.iter())
            .map(|&(x, y)| (x, shown(y)))
            .filter(|point| range.contains(&point.1))
            .collect();
        let style = match line.style {
            Style::Thick => color.stroke_width(2),
            Style::Thin => color.mix(THIN_OPACITY).stroke_width(1),
        };
        if line.style == Style::Thick {
            let dots = points
                .iter()
                .map(|&point| Circle::new(point, 3, color.filled()));
            axes.draw_series(dots)?;
        }
        let drawn = axes.draw_series(LineSeries::new(points, style))?;
        if !line.label.is_empty() {
            drawn
                .label(&line.label)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], style));
        }
    }
    if legend {
        axes.configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3))
            .label_font(("sans-serif", LETTERS))
            .draw()?;
    }
    Ok(())
}

/// The color of a number, of `count` that a chart has.
fn color(number: usize, count: usize) -> RGBColor {
    if count <= COLORS.len() {
        return COLORS[number];
    }
    let depth = number as f64 / (count - 1) as f64 * (SHADES.len() - 1) as f64;
    let i = (depth as usize).min(SHADES.len() - 2);
    let part = depth - i as f64;
    let mix = |from: u8, to: u8| (f64::from(from) * (1. - part) + f64::from(to) * part) as u8;
    let (from, to) = (SHADES[i], SHADES[i + 1]);
    RGBColor(mix(from.0, to.0), mix(from.1, to.1), mix(from.2, to.2))
}

/// A place on an axis. Zero comes as what sums of steps round to.
fn tick(value: f64, length: f64) -> f64 {
    match value.abs() < 1e-9 * length {
        true => 0.,
        false => value,
    }
}

fn number(value: f64) -> String {
    match value.abs() {
        f64::INFINITY => "∞".into(),
        0. => "0".into(),
        size if size >= 100. || size == size.trunc() => format!("{value:.0}"),
        size if size >= 0.01 => format!("{value:.2}"),
        _ => format!("{value:.0e}"),
    }
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
            let runs = [("a label".to_string(), &history)];
            draw(&path, &[losses("a title".into(), "loss", &runs)], 1).unwrap();
            let svg = std::fs::read_to_string(&path).unwrap();
            assert!(svg.contains("a label") && svg.contains("a title"));
            assert!(svg.trim_end().ends_with("</svg>"));
            assert!(!svg.contains("NaN"));
        }
    }

    /// Nine layers were in six colors, of which three came twice.
    #[test]
    fn every_line_of_a_panel_has_a_stroke_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("layers.svg");
        for count in [1, COLORS.len(), COLORS.len() + 1, 9, 30] {
            let line = |color: usize| Line {
                label: format!("layer {color}"),
                points: vec![(0., color as f64), (1., 1. + color as f64)],
                style: Style::Thin,
                color,
            };
            let chart = || Chart {
                lines: (0..count).map(line).collect(),
                ..Default::default()
            };
            draw(&path, &[chart(), chart()], 2).unwrap();
            let svg = std::fs::read_to_string(&path).unwrap();
            let lines = svg.split("<polyline ").skip(1);
            // Those of the mesh and of the axes are of full opacity.
            let opacity = format!("opacity=\"{THIN_OPACITY}\"");
            let lines = lines.filter(|line| line.contains(&opacity));
            let strokes: Vec<&str> = lines
                .map(|line| line.split("stroke=").nth(1).unwrap().split(' ').next())
                .map(Option::unwrap)
                .collect();
            // Each in the plot and in the legend of either panel.
            assert_eq!(strokes.len(), 4 * count);
            let distinct: std::collections::BTreeSet<&str> = strokes.into_iter().collect();
            assert_eq!(distinct.len(), count);
        }
    }

    /// It was labelled -6e-17.
    #[test]
    fn zero_is_labelled_as_such() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("zero.svg");
        let chart = Chart {
            lines: vec![Line {
                points: vec![(-0.41, -0.41), (0.83, 0.83)],
                ..Default::default()
            }],
            ..Default::default()
        };
        draw(&path, &[chart], 1).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        assert!(svg.contains("\n0\n") && !svg.contains("e-1"), "{svg}");
    }

    #[test]
    fn marks_what_is_above_the_ceiling() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ceiling.svg");
        for logarithmic in [false, true] {
            let line = |color, high| Line {
                label: format!("line {color}"),
                points: vec![(1., high), (2., 20.), (3., 21.)],
                style: Style::Thick,
                color,
            };
            let chart = Chart {
                lines: vec![line(0, 22.), line(1, 136.2), line(2, f64::INFINITY)],
                ceiling: Some(23.),
                logarithmic,
                ..Default::default()
            };
            draw(&path, &[chart], 1).unwrap();
            let svg = std::fs::read_to_string(&path).unwrap();
            assert_eq!(svg.matches("<polygon").count(), 2, "{svg}");
            assert_eq!(svg.matches("<circle").count(), 3 + 2 + 2);
            for (label, shown) in [("0 22", false), ("1 136", true), ("2 ∞", true)] {
                assert_eq!(svg.contains(&format!("line {label}")), shown, "{label}");
            }
        }
    }

    #[test]
    fn draws_panels_and_logarithms_of_what_has_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("panels.svg");
        let line = |label: &str, points: &[(f64, f64)]| Line {
            label: label.into(),
            points: points.to_vec(),
            ..Default::default()
        };
        let chart = |title: &str, logarithmic| Chart {
            title: title.into(),
            lines: vec![line(
                title,
                &[(1., 1e-3), (2., 0.), (3., f64::NAN), (4., 1e3)],
            )],
            logarithmic,
            ..Default::default()
        };
        let charts = ["one", "two", "three"].map(|title| chart(title, title != "one"));
        draw(&path, &charts, 2).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        for title in ["one", "two", "three"] {
            assert!(svg.contains(title), "{title}");
        }
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }
}
