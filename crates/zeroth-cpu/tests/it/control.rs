//! The control kernel of the CPU: gradient norm, loss scale, skipped steps. The sequences of loss scales are DeepSpeed's own,
//! written by `make_loss_scales.py`.

use bytemuck::{Pod, Zeroable, bytes_of, cast_slice, pod_read_unaligned};
use half::{bf16, f16};
use serde_json::Value;
use zeroth_base::DType;
use zeroth_cpu::CpuDevice;
use zeroth_kernel::{
    ByTier, Control, Device, DeviceError, GradStore, HeadLossDw, Kernel, LOSSES, Launch, MasterForm, Moment,
    Optimizer, Queue, Recipe, Record, ReportLayout, Rounding, Span, StepInput, TiedRowsOut,
};
use zeroth_kernel::{ExactSum, HeadLossDims};

/// A rank's report: its loss, and per flat buffer the sum of squares and whether its own gradient was infinite or NaN.
type RankReport = (f64, Vec<(f64, bool)>);

/// A device with the state of a run.
struct Run {
    device: CpuDevice,
    recipe: Recipe,
    control: Control,
}

fn put<T: Pod>(device: &mut CpuDevice, at: u64, values: &[T]) -> Span {
    let bytes: &[u8] = cast_slice(values);
    let span = Span::device(at, bytes.len() as u64);
    device.upload(Queue::Compute, bytes, span).unwrap();
    span
}

fn get<T: Pod>(device: &mut CpuDevice, span: Span) -> Vec<T> {
    let mut bytes = vec![0; span.bytes as usize];
    device.download(Queue::Compute, span, &mut bytes).unwrap();
    bytes.chunks_exact(size_of::<T>()).map(pod_read_unaligned).collect()
}

fn launch(device: &mut CpuDevice, dtype: DType, kernel: Kernel) -> Result<(), DeviceError> {
    device.enqueue(Queue::Compute, &Launch { kernel, dtype, scratch: Span::device(0, 0) })
}

impl Run {
    fn new(recipe: Recipe) -> Self {
        Self {
            device: CpuDevice::new(3, ByTier::on_device(1 << 20)).unwrap(),
            recipe,
            control: Control::start(&recipe),
        }
    }

    fn step(&mut self, told: &[RankReport]) -> (Record, Vec<f64>) {
        let flats = told[0].1.len();
        let mut reports = Vec::new();
        for (loss, flats) in told {
            reports.extend_from_slice(&loss.to_ne_bytes());
            for (squares, _) in flats {
                let mut sum = ExactSum::default();
                sum.add(*squares);
                reports.extend_from_slice(bytes_of(&sum));
            }
            reports.extend(flats.iter().flat_map(|(_, found_inf)| u64::from(*found_inf).to_ne_bytes()));
        }
        let mut input =
            StepInput { loss_means: [0.25; LOSSES], loss_weights: [0.25; LOSSES], ..StepInput::zeroed() };
        input.rates.iter_mut().enumerate().for_each(|(place, rate)| *rate = 1.0 / (place + 1) as f64);
        let device = &mut self.device;
        let layout = ReportLayout { losses: 1, flats, counts: 0 };
        let record = Span::device(0, layout.record_bytes() as u64);
        let control = put(device, 4096, &[self.control]);
        let kernel = Kernel::Control {
            ranks: told.len(),
            layout,
            recipe: put(device, 8192, &[self.recipe]),
            input: put(device, 12_288, &[input]),
            reports: put(device, 16_384, &reports),
            control,
            record,
        };
        launch(device, DType::F32, kernel).unwrap();
        self.control = get(device, control)[0];
        let head = get(device, record.part(0, 1, size_of::<Record>() as u64))[0];
        (head, get(device, record.part(size_of::<Record>() as u64 / 8 + 1, flats as u64, 8)))
    }
}

const CLEAN: (f64, bool) = (1.0, false);
/// What a gradient with infinity in it tells where it was, and what the sum over ranks tells where it is reduced.
const FLAGGED: (f64, bool) = (1.0, true);
const BROKEN: (f64, bool) = (f64::INFINITY, false);

fn dynamic() -> Recipe {
    Recipe { dynamic: 1, loss_scale: 65_536.0, ..Recipe::default() }
}

#[test]
fn the_loss_scale_follows_deepspeeds_scaler_step_by_step() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("../loss-scales.json")).unwrap();
    assert_eq!(cases.len(), 93);
    let mut gave_up = 0;
    for case in &cases {
        let mut run = Run::new(Recipe {
            dynamic: 1,
            loss_scale: case["loss_scale"].as_f64().unwrap(),
            min_scale: case["min_scale"].as_f64().unwrap(),
            scale_window: case["window"].as_u64().unwrap(),
            hysteresis: case["hysteresis"].as_u64().unwrap(),
            consecutive_hysteresis: u32::from(case["consecutive"] == true),
            ..Recipe::default()
        });
        let runs = case["scales"].as_array().unwrap();
        let scales: Vec<f64> = runs
            .iter()
            .flat_map(|run| vec![run[0].as_f64().unwrap(); run[1].as_u64().unwrap() as usize])
            .collect();
        for (at, step) in case["steps"].as_str().unwrap().chars().enumerate() {
            let before = run.control;
            // One rank of two overflows.
            let second = if step == 'x' { FLAGGED } else { CLEAN };
            let (record, _) = run.step(&[(1.0, vec![CLEAN]), (1.0, vec![second])]);
            let named = format!("step {at} of {case}");
            assert_eq!(record.loss_scale, before.loss_scale, "the one in use, {named}");
            if at == scales.len() {
                assert_eq!((record.halted, record.at_min_scale, record.apply), (1, 1, 0), "{named}");
                let (again, _) = run.step(&[(1.0, vec![CLEAN]), (1.0, vec![CLEAN])]);
                assert_eq!((again.apply, again.at_min_scale), (0, 1), "until the host says so, {named}");
                gave_up += 1;
                break;
            }
            assert_eq!((record.halted, record.at_min_scale), (0, 0), "{named}");
            assert_eq!(record.apply, u32::from(step == '.'), "{named}");
            assert_eq!(run.control.loss_scale, scales[at], "{named}");
        }
    }
    assert!(gave_up > 10, "{gave_up} sequences end at the smallest scale");
}

#[test]
fn gradients_are_unscaled_with_the_scale_of_their_backward() {
    let mut run = Run::new(Recipe { loss_scale: 4.0, scale_window: 1, max_norm: 1.0, ..dynamic() });
    for (scale, after) in [(4.0, 4.0), (4.0, 8.0), (8.0, 16.0)] {
        let (record, norms) = run.step(&[(1.0, vec![(64.0, false), (36.0, false)])]);
        assert_eq!((record.loss_scale, run.control.loss_scale), (scale, after));
        assert_eq!((record.norm, norms), (10.0 / scale, vec![8.0 / scale, 6.0 / scale]));
        let clip = (1.0 / (10.0 / scale + 1e-6)).min(1.0) as f32;
        assert_eq!(run.control.numbers.map(|numbers| numbers.unscale), [1.0 / scale as f32; 2]);
        assert_eq!(run.control.numbers[0].clip, clip);
    }
}

#[test]
fn the_record_names_flat_and_rank_of_a_nonfinite_gradient() {
    let named = |told: &[RankReport]| {
        let (record, _) = Run::new(Recipe { tolerated: 9, ..Recipe::default() }).step(told);
        assert_eq!(
            (record.apply, record.skipped, record.halted),
            (1 - record.found_inf, record.found_inf.into(), 0)
        );
        (record.found_inf, record.nonfinite_flat, record.nonfinite_rank)
    };
    let all = || vec![CLEAN; 3];
    assert_eq!(named(&[(1.0, all()), (1.0, all())]), (0, -1, -1));
    // Rank 1 broke flat 1; whoever reduces it sees its sum, wherever that is.
    let told = [(1.0, vec![CLEAN, BROKEN, CLEAN]), (1.0, vec![CLEAN, FLAGGED, FLAGGED])];
    assert_eq!(named(&told), (1, 1, 1));
    // The first flat counts, then the first rank.
    let told = [
        (f64::NAN, vec![CLEAN, CLEAN, FLAGGED]),
        (1.0, vec![CLEAN, FLAGGED, CLEAN]),
        (1.0, vec![CLEAN, FLAGGED, CLEAN]),
    ];
    assert_eq!(named(&told), (1, 1, 1));
    // A loss alone, and with sums that follow from it.
    assert_eq!(named(&[(1.0, all()), (f64::INFINITY, all())]), (1, -1, 1));
    assert_eq!(named(&[(f64::NAN, vec![BROKEN; 3]), (1.0, all())]), (1, -1, 0));
    // Finite on every rank, and too large together.
    assert_eq!(named(&[(1.0, vec![CLEAN, CLEAN, BROKEN]), (1.0, all())]), (1, 2, -1));
}

#[test]
fn overflows_at_a_constant_scale_count_against_the_tolerated_steps() {
    for loss_scale in [1.0, 1024.0] {
        let mut run = Run::new(Recipe { loss_scale, tolerated: 2, ..Recipe::default() });
        let mut halted = Vec::new();
        for flat in [FLAGGED, CLEAN, FLAGGED, CLEAN, FLAGGED, CLEAN] {
            let (record, _) = run.step(&[(1.0, vec![flat])]);
            assert_eq!((record.loss_scale, record.at_min_scale), (loss_scale, 0));
            halted.push((record.apply, record.halted));
        }
        assert_eq!(halted, [(0, 0), (1, 0), (0, 0), (1, 0), (0, 1), (0, 1)]);
        assert_eq!((run.control.applied, run.control.skipped), (2, 3));
    }
}

#[test]
fn overflows_of_a_dynamic_scale_do_not_count_against_the_tolerated_steps() {
    let mut run = Run::new(Recipe { tolerated: 0, ..dynamic() });
    let rates: Vec<f64> = [FLAGGED, FLAGGED, FLAGGED, CLEAN, FLAGGED, CLEAN]
        .into_iter()
        .map(|flat| run.step(&[(1.0, vec![flat])]).0.rate)
        .collect();
    assert_eq!((run.control.applied, run.control.skipped, run.control.halted), (2, 4, 0));
    // 65,536 stays at the first of hysteresis 2, then halves at each.
    assert_eq!(run.control.loss_scale, 8192.0);
    assert_eq!(rates, [1.0, 1.0, 1.0, 1.0, 0.5, 0.5], "the schedule waits for applied steps");
}

#[test]
fn a_skipped_step_changes_neither_weights_nor_moments() {
    let mut device = CpuDevice::new(2, ByTier::on_device(1 << 20)).unwrap();
    let values: Vec<f32> = (0..3000).map(|i| 1.0 + (i as f32 * 0.1).sin()).collect();
    for (told, changes) in [(FLAGGED, false), (CLEAN, true)] {
        let mut run = Run::new(Recipe { loss_scale: 4.0, ..dynamic() });
        run.step(&[(1.0, vec![told])]);
        for &optimizer in Optimizer::ALL {
            let narrow: Vec<bf16> = values.iter().map(|&value| bf16::from_f32(value)).collect();
            let (master, weights) = (put(&mut device, 0, &values), put(&mut device, 65_536, &narrow));
            let moments = [131_072, 196_608, 393_216].map(|at| put(&mut device, at, &narrow));
            let kernel = Kernel::Optimize {
                optimizer,
                group: 0,
                control: put(&mut device, 262_144, &[run.control]),
                grads: put(&mut device, 327_680, &values),
                grad_type: DType::F32,
                master,
                master_form: MasterForm::F32,
                moments: moments.map(Some),
                moment_type: DType::Bf16,
                rounding: Some(Rounding { seed: 1, flat: 0, first: 0 }),
                weights: Some(weights),
            };
            launch(&mut device, DType::Bf16, kernel).unwrap();
            let found: Vec<f32> = get(&mut device, master);
            assert_eq!(found != values, changes, "{optimizer:?}");
            let moments = moments.map(|span| get::<bf16>(&mut device, span) != narrow);
            let keeps = |moment| optimizer != Optimizer::Sgd && optimizer.moments().contains(&moment);
            let expected = Moment::ALL.map(|moment| changes && keeps(moment));
            assert_eq!(moments, expected, "{optimizer:?} without momentum");
            let stored: Vec<bf16> = found.iter().map(|&value| bf16::from_f32(value)).collect();
            assert_eq!(get::<bf16>(&mut device, weights), stored, "{optimizer:?}");
        }
    }
}

#[test]
fn missing_moments_and_fp16_moments_are_refused() {
    let mut device = CpuDevice::new(1, ByTier::on_device(1 << 16)).unwrap();
    let control = Control { apply: 1, ..Control::new(1.0) };
    let (control, grads) = (put(&mut device, 0, &[control]), put(&mut device, 512, &[1.0f32; 4]));
    let kernel = |optimizer, first, second, moment_type| Kernel::Optimize {
        optimizer,
        group: 0,
        control,
        grads,
        grad_type: DType::F32,
        master: Span::device(1024, 16),
        master_form: MasterForm::F32,
        moments: [first, second, None],
        moment_type,
        rounding: None,
        weights: None,
    };
    let (one, other) = (Some(Span::device(2048, 16)), Some(Span::device(3072, 16)));
    for refused in [
        kernel(Optimizer::AdamW, None, other, DType::F32),
        kernel(Optimizer::Adam, one, None, DType::F32),
        kernel(Optimizer::Lion, None, None, DType::F32),
        kernel(Optimizer::Adagrad, one, None, DType::F32),
        kernel(Optimizer::AdamW, one, other, DType::F16),
    ] {
        let error = launch(&mut device, DType::F32, refused).unwrap_err().to_string();
        assert!(error.starts_with("optimize: ") && error.contains("moments"), "{error}");
    }
    launch(&mut device, DType::F32, kernel(Optimizer::Sgd, None, None, DType::F32)).unwrap();
}

#[test]
fn a_conversion_sets_found_inf_only_for_nonfinite_results() {
    let mut device = CpuDevice::new(3, ByTier::on_device(1 << 20)).unwrap();
    let bytes_of_type = |dtype: DType, values: &[f32]| -> Vec<u8> {
        match dtype {
            DType::F32 => cast_slice(values).to_vec(),
            DType::Bf16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_ne_bytes()).collect(),
            DType::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_ne_bytes()).collect(),
        }
    };
    let types = [DType::F32, DType::Bf16, DType::F16];
    let mut values = vec![1.5f32; 40_000];
    // (what is written at some place, the types in which it is not finite)
    let cases: [(f32, &[DType]); 4] = [
        (60_000.0, &[]),
        (70_000.0, &[DType::F16]),
        (f32::MAX, &[DType::Bf16, DType::F16]),
        (f32::NAN, &types),
    ];
    for (value, broken_types) in cases {
        for place in [0, 16_383, 39_999] {
            values[place] = value;
            for (from_type, to_type) in types.iter().flat_map(|from| types.map(|to| (*from, to))) {
                let stored = bytes_of_type(from_type, &values);
                let (from, flag) = (put(&mut device, 0, &stored), put(&mut device, 1 << 19, &[7u64]));
                let to = Span::device(1 << 18, 40_000 * to_type.bytes());
                let kernel = Kernel::Convert { from, from_type, to, to_type, found_inf: Some(flag) };
                launch(&mut device, DType::F32, kernel).unwrap();
                let found_inf = [from_type, to_type].iter().any(|dtype| broken_types.contains(dtype));
                let expected = if found_inf { 1 } else { 7 };
                let named = format!("{value} at {place}, {from_type} to {to_type}");
                assert_eq!(get::<u64>(&mut device, flag), [expected], "{named}");
                let clean = (place + 1) % 40_000;
                let found = get::<u8>(&mut device, to.part(clean as u64, 1, to_type.bytes()));
                assert_eq!(found, bytes_of_type(to_type, &[1.5]), "{named}");
            }
            values[place] = 1.5;
        }
    }
}

#[test]
fn a_head_refuses_unsupported_gradient_stores() {
    let mut device = CpuDevice::new(1, ByTier::on_device(1 << 20)).unwrap();
    let place = |at: u64, bytes: u64| Span::device(at << 12, bytes);
    let dims = HeadLossDims::new(2, 3, 5);
    let tokens = |rows: Span| TiedRowsOut { ids: place(3, 8), rows };
    let (dw, found_inf) = (place(9, 60), place(10, 8));
    let kernel = |store: GradStore, tied_rows: Option<TiedRowsOut>| Kernel::HeadLossBackward {
        dims,
        x: place(0, 12),
        w: place(1, 30),
        labels: place(2, 8),
        loss: place(5, 8),
        loss_weight: place(6, 8),
        control: place(7, size_of::<Control>() as u64),
        dx: Some(place(8, 12)),
        dw: Some(HeadLossDw { to: dw, store, tied_rows }),
    };
    let round = |to: DType| GradStore::Round { to, found_inf };
    // Another dtype; tied rows with a gradient that is not rounded.
    for (store, own, said) in [
        (round(DType::F16), None, "F16"),
        (GradStore::Write, Some(tokens(place(4, 24))), "Write"),
        (round(DType::Bf16), Some(tokens(dw)), "overlap"),
    ] {
        let error = launch(&mut device, DType::Bf16, kernel(store, own)).unwrap_err().to_string();
        assert!(error.starts_with("head_loss_backward: ") && error.contains(said), "{error}");
    }
}

#[test]
fn the_loss_of_a_step_is_the_weighted_sum_of_its_parts() {
    let mut device = CpuDevice::new(1, ByTier::on_device(1 << 20)).unwrap();
    let layout = ReportLayout { losses: 3, flats: 1, counts: 3 };
    let run = |device: &mut CpuDevice, reports: &[[f64; 3]]| {
        let mut bytes = Vec::new();
        for (rank, losses) in (1..).zip(reports) {
            let mut sum = ExactSum::default();
            sum.add(4.0);
            let counts: [u32; 4] = [rank, 0, 10 * rank, u32::MAX];
            bytes.extend([cast_slice(losses), bytes_of(&sum), bytes_of(&0u64), bytes_of(&counts)].concat());
        }
        // Means over eight tokens, weighted by 4, 2 and 16.
        let (loss_means, loss_weights) = ([0.125; LOSSES], [0.5, 0.25, 2.0, f64::NAN]);
        let input = StepInput { loss_means, loss_weights, ..StepInput::zeroed() };
        let record = Span::device(0, layout.record_bytes() as u64);
        let recipe = Recipe { tolerated: 10, ..Recipe::default() };
        let kernel = Kernel::Control {
            ranks: reports.len(),
            layout,
            recipe: put(device, 8192, &[recipe]),
            input: put(device, 12_288, &[input]),
            reports: put(device, 16_384, &bytes),
            control: put(device, 4096, &[Control::start(&recipe)]),
            record,
        };
        launch(device, DType::F32, kernel).unwrap();
        let head: Record = get(device, record.part(0, 1, size_of::<Record>() as u64))[0];
        let numbers = get::<f64>(device, record.part(size_of::<Record>() as u64 / 8, 4, 8));
        // Every rank's counts, and nothing of their padding.
        let ranks = 1..=reports.len() as u32;
        let expected = [ranks.clone().sum(), 0, ranks.map(|rank| 10 * rank).sum::<u32>()];
        assert_eq!(get::<u32>(device, record.part(layout.recorded_counts() as u64 / 4, 3, 4)), expected);
        (head, numbers)
    };
    let (head, numbers) = run(&mut device, &[[3.0, 8.0, 0.125], [1.0, 16.0, 0.5]]);
    assert_eq!(
        numbers,
        [0.5, 3.0, 0.078_125, 8.0f64.sqrt()],
        "means of the parts, then the norm of the flat"
    );
    assert_eq!((head.loss, head.apply, head.nonfinite_rank), (2.0 + 6.0 + 1.25, 1, -1));
    // Any part of any rank that is not finite skips the step.
    for part in 0..3 {
        let mut second = [1.0; 3];
        second[part] = f64::INFINITY;
        let (head, _) = run(&mut device, &[[1.0; 3], second]);
        assert_eq!((head.apply, head.found_inf, head.nonfinite_rank), (0, 1, 1), "part {part}");
    }
}
