//! What each kernel is on a card: its operands, checked against its sizes, and the functions that are enqueued.

use zeroth_base::DType;

use super::cublaslt::place;
use super::cudnn::Fused;
use super::line::{Line, THREADS, float};
use super::products::{Matrix, Products, Task};
use super::programs::Entry;
use super::scratch::{WORKSPACE, blocks, exact_sums};
use super::{attention, head, norm_rope, rows};
use zeroth_kernel::{
    Control, DeviceError, GROUPS, GradStore, Kernel, MasterForm, Optimizer, Recipe, Record, Report, Rounding,
    Span, StepInput,
};
use zeroth_kernel::{ExactSum, LinearDims, RowKey};

/// Enqueues a kernel.
pub(super) fn run(
    line: &mut Line,
    products: &mut Products,
    fused: &mut Fused,
    kernel: &Kernel,
) -> Result<(), DeviceError> {
    let dtype = line.dtype;
    match *kernel {
        Kernel::Embedding { dims, rows, ids, table, y } => rows::embedding(line, dims, rows, [ids, table, y]),
        Kernel::EmbeddingBackward { dims, rows, ids, dy, dtable, waiting: None } => {
            rows::embedding_backward(line, dims, rows, [ids, dy, dtable])
        }
        Kernel::EmbeddingBackward { waiting: Some(_), .. }
        | Kernel::HeadLossBackward { landing: GradStore::Round { .. }, .. }
        | Kernel::HeadLossBackward { own: Some(_), .. } => {
            let problem = "on a card the head's gradient lands in f32 and is rounded later".to_owned();
            Err(DeviceError::Operands { what: kernel.name(), problem })
        }
        Kernel::Linear { .. } | Kernel::LinearDx { .. } | Kernel::LinearDw { .. } => {
            linear(line, products, kernel)
        }
        Kernel::LinearDb { dims, dy, db } => {
            let dy = line.typed("dy", dy, dims.rows * dims.outputs)?;
            let db = line.words("db", db, dims.outputs)?;
            rows::sum_columns(line, dy, None, [dims.rows, dims.outputs], db)
        }
        Kernel::RmsNorm { dims, x, w, y, rstd } => rows::norm(line, dims, x, None, [w, y, rstd]),
        Kernel::AddRmsNorm { dims, x, residual, w, h, y, rstd } => {
            rows::norm(line, dims, x, Some((residual, h)), [w, y, rstd])
        }
        Kernel::RmsNormBackward { dims, dy, h, rstd, w, residual, dh, dw } => {
            rows::norm_backward(line, dims, [dy, h, rstd, w], residual, [dh, dw])
        }
        Kernel::Rope { dims, cos, sin, x, y, back } => norm_rope::rope(line, dims, [cos, sin], x, y, back),
        Kernel::HeadNormRope { dims, x, w, cos, sin, y, rstd } => {
            norm_rope::forward(line, dims, [x, w], [cos, sin], [y, rstd])
        }
        Kernel::HeadNormRopeBackward { dims, dy, h, rstd, w, cos, sin, dh, dw } => {
            norm_rope::backward(line, dims, [dy, h, rstd, w], [cos, sin], [dh, dw])
        }
        Kernel::Attention { dims, starts, q, k, v, y, lse } => {
            attention::forward(line, fused, &dims, starts, [q, k, v], y, lse)
        }
        Kernel::AttentionBackward { dims, starts, q, k, v, y, lse, dy, dq, dk, dv } => {
            attention::backward(line, &dims, starts, [q, k, v], [y, lse, dy], [dq, dk, dv])
        }
        Kernel::SwiGlu { gate, up, y } => {
            let count = line.count("y", y, dtype)?;
            let (gate, up) = (line.typed("gate", gate, count)?, line.typed("up", up, count)?);
            let y = line.typed("y", y, count)?;
            line.lots(Entry::SwiGlu, &[dtype], count, &[gate, up, y, count as u64])
        }
        Kernel::SwiGluBackward { dy, gate, up, dgate, dup } => {
            let count = line.count("dy", dy, dtype)?;
            let dy = line.typed("dy", dy, count)?;
            let (gate, up) = (line.typed("gate", gate, count)?, line.typed("up", up, count)?);
            let (dgate, dup) = (line.typed("dgate", dgate, count)?, line.typed("dup", dup, count)?);
            line.lots(Entry::SwiGluBackward, &[dtype], count, &[dy, gate, up, dgate, dup, count as u64])
        }
        Kernel::Dropout { probability, seed, op, width, keys, x, y } => {
            let rows = keys.bytes as usize / size_of::<RowKey>();
            let keys = line.sized("keys", keys, rows, size_of::<RowKey>() as u64)?;
            let (x, y) = (line.typed("x", x, rows * width)?, line.typed("y", y, rows * width)?);
            let threshold = (f64::from(probability) * 4_294_967_296.0) as u64;
            let scale = float(1.0 / (1.0 - probability));
            let arguments = [keys, x, y, rows as u64, width as u64, threshold, scale, seed, u64::from(op)];
            line.each(Entry::Dropout, &[dtype], rows * width.div_ceil(4), &arguments)
        }
        Kernel::HeadLoss { dims, x, w, labels, loss } => {
            head::run(line, products, dims, [x, w, labels, loss], None)
        }
        Kernel::HeadLossBackward {
            dims,
            x,
            w,
            labels,
            loss,
            input,
            control,
            dx,
            dw,
            landing: landing @ (GradStore::Add | GradStore::Write),
            own: None,
        } => {
            let add = landing == GradStore::Add;
            head::run(line, products, dims, [x, w, labels, loss], Some(([input, control, dx, dw], add)))
        }
        Kernel::Logits { dims, starts, x, w, logits } => {
            head::logits(line, products, dims, starts, [x, w], logits)
        }
        Kernel::Sum { a, b, y } => {
            let count = line.count("y", y, dtype)?;
            let (a, b) = (line.typed("a", a, count)?, line.typed("b", b, count)?);
            let y = line.typed("y", y, count)?;
            line.lots(Entry::Sum, &[dtype], count, &[a, b, y, count as u64])
        }
        Kernel::Zero { to } => zero(line, to),
        Kernel::Convert { from, from_type, to, to_type, broken } => {
            let count = line.count("from", from, from_type)?;
            let bytes = from.bytes;
            let from = line.sized("from", from, count, from_type.bytes())?;
            let to = line.sized("to", to, count, to_type.bytes())?;
            let broken = broken.map(|broken| line.one::<u64>("broken", broken)).transpose()?;
            if from_type == to_type && broken.is_none() {
                return line.copy(to, from, bytes);
            }
            let arguments = [from, to, count as u64, broken.unwrap_or(0)];
            line.lots(Entry::Convert, &[from_type, to_type], count, &arguments)
        }
        Kernel::Look { values, value_type, broken } => look(line, values, value_type, broken),
        Kernel::SumRanks { ranks, parts, from_type, to, to_type, add } => {
            let count = line.count("to", to, to_type)?;
            let parts = line.sized("parts", parts, ranks * count, from_type.bytes())?;
            let to = line.sized("to", to, count, to_type.bytes())?;
            let arguments = [parts, ranks as u64, to, count as u64, u64::from(add)];
            line.lots(Entry::SumRanks, &[from_type, to_type], count, &arguments)
        }
        Kernel::Squares { values, value_type, sum } => squares(line, values, value_type, sum),
        Kernel::Control { .. } => control(line, kernel),
        Kernel::Optimize { .. } => optimize(line, kernel),
    }
}

fn linear(line: &mut Line, products: &mut Products, kernel: &Kernel) -> Result<(), DeviceError> {
    let (from, workspace) = (line.dtype, line.scratch.take(WORKSPACE)?);
    let task = match *kernel {
        Kernel::Linear { dims: LinearDims { rows, inputs, outputs }, x, w, bias, y } => Task {
            size: [rows, outputs, inputs],
            p: Matrix::rows(line.typed("x", x, rows * inputs)?, inputs),
            q: Matrix::transposed(line.typed("w", w, outputs * inputs)?, inputs),
            from,
            d: Matrix::rows(line.typed("y", y, rows * outputs)?, outputs),
            to: from,
            bias: bias.map(|bias| line.typed("bias", bias, outputs)).transpose()?,
            add: false,
        },
        Kernel::LinearDx { dims: LinearDims { rows, inputs, outputs }, dy, w, dx, add } => Task {
            size: [rows, inputs, outputs],
            p: Matrix::rows(line.typed("dy", dy, rows * outputs)?, outputs),
            q: Matrix::rows(line.typed("w", w, outputs * inputs)?, inputs),
            from,
            d: Matrix::rows(line.typed("dx", dx, rows * inputs)?, inputs),
            to: from,
            bias: None,
            add,
        },
        Kernel::LinearDw { dims: LinearDims { rows, inputs, outputs }, dy, x, dw, landing } => Task {
            size: [outputs, inputs, rows],
            p: Matrix::transposed(line.typed("dy", dy, rows * outputs)?, outputs),
            q: Matrix::rows(line.typed("x", x, rows * inputs)?, inputs),
            from,
            d: Matrix::rows(line.sized("dw", dw, outputs * inputs, to_type(landing).bytes())?, inputs),
            to: to_type(landing),
            bias: None,
            add: landing == GradStore::Add,
        },
        _ => unreachable!("called for products only"),
    };
    products.multiply(line, &task, workspace)?;
    match *kernel {
        Kernel::LinearDw { dw, landing: GradStore::Round { to, broken }, .. } => look(line, dw, to, broken),
        _ => Ok(()),
    }
}

const fn to_type(landing: GradStore) -> DType {
    match landing {
        GradStore::Add | GradStore::Write => DType::F32,
        GradStore::Round { to, .. } => to,
    }
}

fn look(line: &Line, values: Span, value_type: DType, broken: Span) -> Result<(), DeviceError> {
    let count = line.count("values", values, value_type)?;
    let values = line.sized("values", values, count, value_type.bytes())?;
    let broken = line.one::<u64>("broken", broken)?;
    line.lots(Entry::Look, &[value_type], count, &[values, count as u64, broken])
}

fn zero(line: &Line, to: Span) -> Result<(), DeviceError> {
    let at = line.arenas.find(line.what, to)?;
    if to.bytes == 0 {
        return Ok(());
    }
    line.driver.set_bytes(at, 0, to.bytes, line.stream)
}

fn squares(line: &mut Line, values: Span, value_type: DType, sum: Span) -> Result<(), DeviceError> {
    let count = line.count("values", values, value_type)?;
    let values = line.sized("values", values, count, value_type.bytes())?;
    let sum = line.one::<ExactSum>("sum", sum)?;
    let blocks = blocks(count as u64);
    let sums = line.scratch.take(8 * blocks)?;
    let exact = line.scratch.take(exact_sums(blocks) * size_of::<ExactSum>() as u64)?;
    let grid = [blocks as usize, 1, 1];
    line.run(Entry::BlockSquares, &[value_type], grid, THREADS, &[values, count as u64, sums])?;
    // Without elements there are no blocks, and their sum is 0 all the same.
    let parts = exact_sums(blocks);
    line.run(Entry::ExactSums, &[], [parts as usize, 1, 1], THREADS, &[sums, blocks, exact])?;
    line.run(Entry::MergeSums, &[], [1; 3], THREADS, &[exact, parts, sum])
}

fn control(line: &Line, kernel: &Kernel) -> Result<(), DeviceError> {
    let Kernel::Control { ranks, flats, recipe, input, reports, control, record } = *kernel else {
        unreachable!("called for control only")
    };
    let recipe = line.one::<Recipe>("recipe", recipe)?;
    let input = line.one::<StepInput>("input", input)?;
    let of_rank = (size_of::<Report>() + flats * (size_of::<ExactSum>() + 8)) / 8;
    let reports = line.sized("reports", reports, ranks * of_rank, 8)?;
    let control = line.one::<Control>("control", control)?;
    let words = size_of::<Record>() / 8 + flats;
    let record = Span { bytes: record.bytes.min(8 * words as u64), ..record };
    let record = line.sized("record", record, words, 8)?;
    let arguments = [ranks as u64, flats as u64, recipe, input, reports, control, record];
    line.run(Entry::Control, &[], [1; 3], THREADS, &arguments)
}

fn optimize(line: &Line, kernel: &Kernel) -> Result<(), DeviceError> {
    let Kernel::Optimize {
        optimizer,
        group,
        control,
        grads,
        grad_type,
        master,
        master_form,
        first,
        second,
        moment_type,
        rounding,
        weights,
    } = *kernel
    else {
        unreachable!("called for the optimizer only")
    };
    if group >= GROUPS {
        return Err(line.refuse(format!("group {group} of {GROUPS}")));
    }
    if moment_type == DType::F16 {
        return Err(line.refuse("moments are fp32 or bf16: those of fp16 would overflow".to_owned()));
    }
    let [needs_first, needs_second] = optimizer.moments();
    // Momentum is in the card's memory: without a place for its velocity, SGD has none.
    let without = optimizer != Optimizer::Sgd && needs_first && first.is_none();
    if without || needs_second && second.is_none() {
        return Err(line.refuse(format!("{optimizer:?} has no place for its moments: {first:?}, {second:?}")));
    }
    let control = line.one::<Control>("control", control)?;
    let count = line.count("grads", grads, grad_type)?;
    let grads = line.sized("grads", grads, count, grad_type.bytes())?;
    let is_beside = weights.is_some() && line.dtype == DType::Bf16;
    if master_form == MasterForm::Rest && !is_beside {
        let problem = format!("what master weights are beside weights in bf16, and weights {weights:?}");
        return Err(line.refuse(problem));
    }
    let master = line.sized("master", master, count, master_form.bytes())?;
    // A moment that the optimizer does not have is not touched.
    let moment = |name, span: Option<Span>, has: bool| match span.filter(|_| has) {
        Some(span) => line.sized(name, span, count, moment_type.bytes()),
        None => Ok(0),
    };
    let (first, second) = (moment("first", first, needs_first)?, moment("second", second, needs_second)?);
    let weights = weights.map(|weights| line.typed("weights", weights, count)).transpose()?.unwrap_or(0);
    let (narrow, chance) = (u64::from(moment_type == DType::Bf16), u64::from(rounding.is_some()));
    let Rounding { seed, flat, first: at } = rounding.unwrap_or(Rounding { seed: 0, flat: 0, first: 0 });
    let (optimizer, group, flat) = (optimizer as u64, group as u64, u64::from(flat));
    let arguments = [
        optimizer,
        group,
        control,
        grads,
        u64::from(place(grad_type)),
        master,
        u64::from(master_form == MasterForm::Rest),
        first,
        second,
        narrow,
        chance,
        seed,
        flat,
        at,
        weights,
        u64::from(place(line.dtype)),
        count as u64,
    ];
    line.lots(Entry::Optimize, &[], count, &arguments)
}

// What the kernels declare on their side.
const _: () =
    assert!(size_of::<ExactSum>() == 88 && size_of::<Recipe>() == 136 && size_of::<StepInput>() == 528);
const _: () = assert!(size_of::<Control>() == 192 && size_of::<Record>() == 80 && size_of::<Report>() == 8);
const _: () = assert!(size_of::<RowKey>() == 16);
