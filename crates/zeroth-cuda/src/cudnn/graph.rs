//! Graphs of the library's operations over tensors of four dimensions, and the plan that computes one.

use std::sync::Arc;

use super::library::{Cudnn, Descriptor, Kind, Name, Object, Type};
use zeroth_kernel::DeviceError;

/// Alignment of every tensor in memory, in bytes.
pub(super) const ALIGNMENT: u64 = 16;

/// The library's numbers of types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Number {
    F32 = 0,
    F16 = 2,
    I32 = 4,
    Bf16 = 9,
    Bool = 11,
}

/// What is done element by element.
#[derive(Debug, Clone, Copy)]
pub(super) enum Mode {
    Add = 0,
    Multiply = 1,
    Divide = 6,
    Subtract = 9,
    Exponential = 13,
    Logarithm = 15,
    IsAtLeast = 303,
    /// The place along an axis.
    Index = 501,
    /// The first where the third is true, else the second.
    Select = 601,
}

/// How a row becomes one number.
#[derive(Debug, Clone, Copy)]
pub(super) enum Fold {
    Sum = 0,
    Largest = 3,
}

/// Where a tensor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Home {
    /// In memory of the card.
    Card,
    /// One number in memory of the host, read when the plan is enqueued.
    Host,
    /// Nowhere: it passes from one operation to the next.
    Between,
}

/// A tensor of a graph.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tensor {
    object: Object,
    id: i64,
    sizes: [i64; 4],
}

impl Tensor {
    /// By which the pack of places knows it.
    pub(super) const fn id(self) -> i64 {
        self.id
    }
}

/// Strides of a tensor without gaps.
const fn dense([_, heads, rows, columns]: [i64; 4]) -> [i64; 4] {
    [heads * rows * columns, rows * columns, columns, 1]
}

/// Engines that may be tried for a graph.
const ENGINES: usize = 16;
/// The library's number of the way to order engines that its makers advise.
const ADVISED: i32 = 3;
/// The note of engines whose results differ from run to run, and room for all notes there are.
const NOT_DETERMINISTIC: i32 = 4;
const NOTES: usize = 16;

/// A graph that is being written down.
pub(super) struct Graph {
    library: Arc<Cudnn>,
    /// Everything that operations point to.
    parts: Vec<Descriptor>,
    operations: Vec<Object>,
    next: i64,
}

impl Graph {
    pub(super) fn new(library: &Arc<Cudnn>) -> Self {
        Self { library: Arc::clone(library), parts: Vec::new(), operations: Vec::new(), next: 1 }
    }

    /// A tensor in memory of the card.
    pub(super) fn given(
        &mut self,
        sizes: [i64; 4],
        strides: [i64; 4],
        number: Number,
    ) -> Result<Tensor, DeviceError> {
        self.tensor(sizes, strides, number, Home::Card)
    }

    /// One f32 that the host gives.
    pub(super) fn value(&mut self) -> Result<Tensor, DeviceError> {
        self.tensor([1; 4], [1; 4], Number::F32, Home::Host)
    }

    /// A tensor between two operations.
    pub(super) fn between(&mut self, sizes: [i64; 4], number: Number) -> Result<Tensor, DeviceError> {
        self.tensor(sizes, dense(sizes), number, Home::Between)
    }

    fn tensor(
        &mut self,
        sizes: [i64; 4],
        strides: [i64; 4],
        number: Number,
        home: Home,
    ) -> Result<Tensor, DeviceError> {
        let id = self.next;
        self.next += 1;
        let tensor = Descriptor::new(&self.library, Kind::Tensor)?;
        tensor.set(Name::TensorType, Type::Number, &[number as i32])?;
        tensor.set(Name::TensorSizes, Type::Int64, &sizes)?;
        tensor.set(Name::TensorStrides, Type::Int64, &strides)?;
        tensor.set(Name::TensorId, Type::Int64, &[id])?;
        tensor.set(Name::TensorAlignment, Type::Int64, &[ALIGNMENT as i64])?;
        tensor.set(Name::TensorIsVirtual, Type::Boolean, &[home == Home::Between])?;
        tensor.set(Name::TensorIsValue, Type::Boolean, &[home == Home::Host])?;
        Ok(Tensor { object: self.keep(tensor.finish()?), id, sizes })
    }

    fn keep(&mut self, part: Descriptor) -> Object {
        let object = part.object();
        self.parts.push(part);
        object
    }

    fn operation(&mut self, operation: Descriptor) -> Result<(), DeviceError> {
        let object = self.keep(operation.finish()?);
        self.operations.push(object);
        Ok(())
    }

    /// c = a · b, matrix by matrix, with sums in f32.
    pub(super) fn multiply(&mut self, a: Tensor, b: Tensor, c: Tensor) -> Result<(), DeviceError> {
        let how = Descriptor::new(&self.library, Kind::Matmul)?;
        how.set(Name::MatmulPrecision, Type::Number, &[Number::F32 as i32])?;
        let how = self.keep(how.finish()?);
        let operation = Descriptor::new(&self.library, Kind::OperationMatmul)?;
        operation.set(Name::OperationMatmulA, Type::Descriptor, &[a.object])?;
        operation.set(Name::OperationMatmulB, Type::Descriptor, &[b.object])?;
        operation.set(Name::OperationMatmulC, Type::Descriptor, &[c.object])?;
        operation.set(Name::OperationMatmul, Type::Descriptor, &[how])?;
        self.operation(operation)
    }

    /// Rows become one number each.
    pub(super) fn fold(&mut self, fold: Fold, x: Tensor) -> Result<Tensor, DeviceError> {
        let [batch, heads, rows, _] = x.sizes;
        let y = self.between([batch, heads, rows, 1], Number::F32)?;
        let how = Descriptor::new(&self.library, Kind::Reduction)?;
        how.set(Name::ReductionOperator, Type::ReductionOperator, &[fold as i32])?;
        how.set(Name::ReductionPrecision, Type::Number, &[Number::F32 as i32])?;
        let how = self.keep(how.finish()?);
        let operation = Descriptor::new(&self.library, Kind::OperationReduction)?;
        operation.set(Name::OperationReductionX, Type::Descriptor, &[x.object])?;
        operation.set(Name::OperationReductionY, Type::Descriptor, &[y.object])?;
        operation.set(Name::OperationReduction, Type::Descriptor, &[how])?;
        self.operation(operation)?;
        Ok(y)
    }

    /// y = mode(x, b), computed in `precision`.
    fn pointwise(
        &mut self,
        (mode, axis): (Mode, Option<i64>),
        precision: Number,
        [x, y]: [Tensor; 2],
        b: Option<Tensor>,
        t: Option<Tensor>,
    ) -> Result<(), DeviceError> {
        let how = Descriptor::new(&self.library, Kind::Pointwise)?;
        how.set(Name::PointwiseMode, Type::PointwiseMode, &[mode as i32])?;
        how.set(Name::PointwisePrecision, Type::Number, &[precision as i32])?;
        if let Some(axis) = axis {
            how.set(Name::PointwiseAxis, Type::Int64, &[axis])?;
        }
        let how = self.keep(how.finish()?);
        let operation = Descriptor::new(&self.library, Kind::OperationPointwise)?;
        operation.set(Name::OperationPointwise, Type::Descriptor, &[how])?;
        operation.set(Name::OperationPointwiseX, Type::Descriptor, &[x.object])?;
        if let Some(b) = b {
            operation.set(Name::OperationPointwiseB, Type::Descriptor, &[b.object])?;
        }
        if let Some(t) = t {
            operation.set(Name::OperationPointwiseT, Type::Descriptor, &[t.object])?;
        }
        operation.set(Name::OperationPointwiseY, Type::Descriptor, &[y.object])?;
        self.operation(operation)
    }

    /// y = mode(x) or mode(x, b) in f32.
    pub(super) fn each(&mut self, mode: Mode, x: Tensor, b: Option<Tensor>) -> Result<Tensor, DeviceError> {
        let y = self.between(x.sizes, Number::F32)?;
        self.each_to(mode, x, b, y)?;
        Ok(y)
    }

    /// As [`Self::each`], to a tensor that is there.
    pub(super) fn each_to(
        &mut self,
        mode: Mode,
        x: Tensor,
        b: Option<Tensor>,
        y: Tensor,
    ) -> Result<(), DeviceError> {
        self.pointwise((mode, None), Number::F32, [x, y], b, None)
    }

    /// x where a row's number is at least the column's, else `other`.
    pub(super) fn below_diagonal(&mut self, x: Tensor, other: Tensor) -> Result<Tensor, DeviceError> {
        let [row, column] = [2, 3].map(|axis| -> Result<Tensor, DeviceError> {
            let y = self.between(x.sizes, Number::I32)?;
            self.pointwise((Mode::Index, Some(axis)), Number::F32, [x, y], None, None)?;
            Ok(y)
        });
        let is_seen = self.between(x.sizes, Number::Bool)?;
        self.pointwise((Mode::IsAtLeast, None), Number::Bool, [row?, is_seen], Some(column?), None)?;
        let y = self.between(x.sizes, Number::F32)?;
        self.pointwise((Mode::Select, None), Number::F32, [x, y], Some(other), Some(is_seen))?;
        Ok(y)
    }

    /// The first plan, in the library's order, that gives the same bits at every run and needs no more than so many bytes of
    /// workspace; `None` where the library has none.
    pub(super) fn plan(self, most: u64) -> Result<Option<Plan>, DeviceError> {
        let graph = Descriptor::new(&self.library, Kind::Graph)?;
        graph.set(Name::GraphHandle, Type::Handle, &[self.library.handle()])?;
        graph.set(Name::GraphOperations, Type::Descriptor, &self.operations)?;
        // From here on a refusal says that the library cannot do it, not that something is wrong.
        let Ok(graph) = graph.finish() else { return Ok(None) };
        let heuristics = Descriptor::new(&self.library, Kind::Heuristics)?;
        heuristics.set(Name::HeuristicsGraph, Type::Descriptor, &[graph.object()])?;
        heuristics.set(Name::HeuristicsMode, Type::HeuristicsMode, &[ADVISED])?;
        let Ok(heuristics) = heuristics.finish() else { return Ok(None) };
        let configs: Vec<Descriptor> = (0..ENGINES)
            .map(|_| Descriptor::new(&self.library, Kind::EngineConfig))
            .collect::<Result<_, _>>()?;
        let mut found: Vec<Object> = configs.iter().map(Descriptor::object).collect();
        let Ok(count) = heuristics.get(Name::HeuristicsResults, Type::Descriptor, &mut found) else {
            return Ok(None);
        };
        for config in configs.iter().take(count) {
            if !is_deterministic(&self.library, config)? {
                continue;
            }
            let plan = Descriptor::new(&self.library, Kind::Plan)?;
            plan.set(Name::PlanHandle, Type::Handle, &[self.library.handle()])?;
            plan.set(Name::PlanConfig, Type::Descriptor, &[config.object()])?;
            let Ok(plan) = plan.finish() else { continue };
            let mut bytes = [0i64];
            plan.get(Name::PlanWorkspace, Type::Int64, &mut bytes)?;
            if bytes[0].max(0) as u64 <= most {
                return Ok(Some(Plan { library: self.library, made: plan, _parts: self.parts }));
            }
        }
        Ok(None)
    }
}

fn is_deterministic(library: &Arc<Cudnn>, config: &Descriptor) -> Result<bool, DeviceError> {
    let engine = Descriptor::new(library, Kind::Engine)?;
    config.get(Name::ConfigEngine, Type::Descriptor, &mut [engine.object()])?;
    let mut notes = [0i32; NOTES];
    let count = engine.get(Name::EngineNotes, Type::NumericalNote, &mut notes)?;
    Ok(!notes[..count].contains(&NOT_DETERMINISTIC))
}

/// How a graph is computed.
pub(super) struct Plan {
    library: Arc<Cudnn>,
    made: Descriptor,
    /// What the plan was made of lives as long as it does.
    _parts: Vec<Descriptor>,
}

impl Plan {
    pub(super) const fn library(&self) -> &Arc<Cudnn> {
        &self.library
    }

    pub(super) const fn descriptor(&self) -> &Descriptor {
        &self.made
    }
}
