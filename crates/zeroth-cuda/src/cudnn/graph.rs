//! Operation graphs over four-dimensional tensors, and their execution plans.

use std::sync::Arc;

use super::library::{Attribute, AttributeType, Cudnn, Descriptor, DescriptorType, Object};
use zeroth_kernel::DeviceError;

/// Required alignment of all tensors in memory, in bytes.
pub(super) const ALIGNMENT: u64 = 16;

/// `cudnnDataType_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DataType {
    F32 = 0,
    F16 = 2,
    I32 = 4,
    Bf16 = 9,
    Bool = 11,
}

/// `cudnnPointwiseMode_t`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum PointwiseMode {
    Add = 0,
    Mul = 1,
    Div = 6,
    Sub = 9,
    Exp = 13,
    Log = 15,
    CmpGe = 303,
    /// The index along an axis.
    GenIndex = 501,
    /// x where t is true, else b.
    BinarySelect = 601,
}

/// `cudnnReduceTensorOp_t`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Reduction {
    Add = 0,
    Max = 3,
}

/// Where a tensor is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Storage {
    Device,
    /// A scalar in host memory, read when the plan is enqueued.
    HostScalar,
    /// An intermediate result that is never stored.
    Virtual,
}

/// A tensor of a graph.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tensor {
    object: Object,
    id: i64,
    sizes: [i64; 4],
}

impl Tensor {
    /// The unique id, which maps it to a pointer in a variant pack.
    pub(super) const fn id(self) -> i64 {
        self.id
    }
}

/// Strides of a contiguous tensor.
const fn contiguous([_, heads, rows, columns]: [i64; 4]) -> [i64; 4] {
    [heads * rows * columns, rows * columns, columns, 1]
}

/// Engine configurations to try for a graph.
const ENGINES: usize = 16;
/// `CUDNN_HEUR_MODE_A`, the recommended heuristics.
pub(crate) const HEUR_MODE_A: i32 = 3;
/// `CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC`.
pub(crate) const NOTE_NONDETERMINISTIC: i32 = 4;
/// Capacity for the numerical notes of an engine.
const NOTES: usize = 16;

/// An operation graph under construction.
pub(super) struct Graph {
    library: Arc<Cudnn>,
    /// Descriptors that the operations refer to.
    parts: Vec<Descriptor>,
    operations: Vec<Object>,
    next: i64,
}

impl Graph {
    pub(super) fn new(library: &Arc<Cudnn>) -> Self {
        Self { library: Arc::clone(library), parts: Vec::new(), operations: Vec::new(), next: 1 }
    }

    /// A tensor in device memory.
    pub(super) fn device_tensor(
        &mut self,
        sizes: [i64; 4],
        strides: [i64; 4],
        dtype: DataType,
    ) -> Result<Tensor, DeviceError> {
        self.tensor(sizes, strides, dtype, Storage::Device)
    }

    /// An f32 scalar passed by the host.
    pub(super) fn scalar(&mut self) -> Result<Tensor, DeviceError> {
        self.tensor([1; 4], [1; 4], DataType::F32, Storage::HostScalar)
    }

    /// An intermediate tensor.
    pub(super) fn virtual_tensor(&mut self, sizes: [i64; 4], dtype: DataType) -> Result<Tensor, DeviceError> {
        self.tensor(sizes, contiguous(sizes), dtype, Storage::Virtual)
    }

    fn tensor(
        &mut self,
        sizes: [i64; 4],
        strides: [i64; 4],
        dtype: DataType,
        storage: Storage,
    ) -> Result<Tensor, DeviceError> {
        let id = self.next;
        self.next += 1;
        let tensor = Descriptor::new(&self.library, DescriptorType::Tensor)?;
        tensor.set(Attribute::TensorDataType, AttributeType::DataType, &[dtype as i32])?;
        tensor.set(Attribute::TensorDimensions, AttributeType::Int64, &sizes)?;
        tensor.set(Attribute::TensorStrides, AttributeType::Int64, &strides)?;
        tensor.set(Attribute::TensorUniqueId, AttributeType::Int64, &[id])?;
        tensor.set(Attribute::TensorAlignment, AttributeType::Int64, &[ALIGNMENT as i64])?;
        tensor.set(Attribute::TensorIsVirtual, AttributeType::Boolean, &[storage == Storage::Virtual])?;
        tensor.set(Attribute::TensorIsByValue, AttributeType::Boolean, &[storage == Storage::HostScalar])?;
        Ok(Tensor { object: self.retain(tensor.finalize()?), id, sizes })
    }

    fn retain(&mut self, part: Descriptor) -> Object {
        let object = part.object();
        self.parts.push(part);
        object
    }

    fn operation(&mut self, operation: Descriptor) -> Result<(), DeviceError> {
        let object = self.retain(operation.finalize()?);
        self.operations.push(object);
        Ok(())
    }

    /// c = a · b, batched, accumulated in f32.
    pub(super) fn matmul(&mut self, a: Tensor, b: Tensor, c: Tensor) -> Result<(), DeviceError> {
        let descriptor = Descriptor::new(&self.library, DescriptorType::Matmul)?;
        descriptor.set(Attribute::MatmulComputeType, AttributeType::DataType, &[DataType::F32 as i32])?;
        let descriptor = self.retain(descriptor.finalize()?);
        let operation = Descriptor::new(&self.library, DescriptorType::OperationMatmul)?;
        operation.set(Attribute::OperationMatmulA, AttributeType::BackendDescriptor, &[a.object])?;
        operation.set(Attribute::OperationMatmulB, AttributeType::BackendDescriptor, &[b.object])?;
        operation.set(Attribute::OperationMatmulC, AttributeType::BackendDescriptor, &[c.object])?;
        operation.set(Attribute::OperationMatmul, AttributeType::BackendDescriptor, &[descriptor])?;
        self.operation(operation)
    }

    /// Reduces the last dimension.
    pub(super) fn reduce(&mut self, reduction: Reduction, x: Tensor) -> Result<Tensor, DeviceError> {
        let [batch, heads, rows, _] = x.sizes;
        let y = self.virtual_tensor([batch, heads, rows, 1], DataType::F32)?;
        let descriptor = Descriptor::new(&self.library, DescriptorType::Reduction)?;
        descriptor.set(
            Attribute::ReductionOperator,
            AttributeType::ReductionOperator,
            &[reduction as i32],
        )?;
        descriptor.set(Attribute::ReductionComputeType, AttributeType::DataType, &[DataType::F32 as i32])?;
        let descriptor = self.retain(descriptor.finalize()?);
        let operation = Descriptor::new(&self.library, DescriptorType::OperationReduction)?;
        operation.set(Attribute::OperationReductionX, AttributeType::BackendDescriptor, &[x.object])?;
        operation.set(Attribute::OperationReductionY, AttributeType::BackendDescriptor, &[y.object])?;
        operation.set(Attribute::OperationReduction, AttributeType::BackendDescriptor, &[descriptor])?;
        self.operation(operation)?;
        Ok(y)
    }

    /// y = mode(x, b, t), computed in `precision`.
    fn add_pointwise(
        &mut self,
        (mode, axis): (PointwiseMode, Option<i64>),
        precision: DataType,
        [x, y]: [Tensor; 2],
        b: Option<Tensor>,
        t: Option<Tensor>,
    ) -> Result<(), DeviceError> {
        let descriptor = Descriptor::new(&self.library, DescriptorType::Pointwise)?;
        descriptor.set(Attribute::PointwiseMode, AttributeType::PointwiseMode, &[mode as i32])?;
        descriptor.set(Attribute::PointwiseMathPrecision, AttributeType::DataType, &[precision as i32])?;
        if let Some(axis) = axis {
            descriptor.set(Attribute::PointwiseAxis, AttributeType::Int64, &[axis])?;
        }
        let descriptor = self.retain(descriptor.finalize()?);
        let operation = Descriptor::new(&self.library, DescriptorType::OperationPointwise)?;
        operation.set(Attribute::OperationPointwise, AttributeType::BackendDescriptor, &[descriptor])?;
        operation.set(Attribute::OperationPointwiseX, AttributeType::BackendDescriptor, &[x.object])?;
        if let Some(b) = b {
            operation.set(Attribute::OperationPointwiseB, AttributeType::BackendDescriptor, &[b.object])?;
        }
        if let Some(t) = t {
            operation.set(Attribute::OperationPointwiseT, AttributeType::BackendDescriptor, &[t.object])?;
        }
        operation.set(Attribute::OperationPointwiseY, AttributeType::BackendDescriptor, &[y.object])?;
        self.operation(operation)
    }

    /// y = mode(x) or mode(x, b), in f32.
    pub(super) fn pointwise(
        &mut self,
        mode: PointwiseMode,
        x: Tensor,
        b: Option<Tensor>,
    ) -> Result<Tensor, DeviceError> {
        let y = self.virtual_tensor(x.sizes, DataType::F32)?;
        self.pointwise_into(mode, x, b, y)?;
        Ok(y)
    }

    /// [`Self::pointwise`] into an existing tensor.
    pub(super) fn pointwise_into(
        &mut self,
        mode: PointwiseMode,
        x: Tensor,
        b: Option<Tensor>,
        y: Tensor,
    ) -> Result<(), DeviceError> {
        self.add_pointwise((mode, None), DataType::F32, [x, y], b, None)
    }

    /// Causal mask: x where row >= column, else `masked`.
    pub(super) fn causal_mask(&mut self, x: Tensor, masked: Tensor) -> Result<Tensor, DeviceError> {
        let [row, column] = [2, 3].map(|axis| -> Result<Tensor, DeviceError> {
            let y = self.virtual_tensor(x.sizes, DataType::I32)?;
            self.add_pointwise((PointwiseMode::GenIndex, Some(axis)), DataType::F32, [x, y], None, None)?;
            Ok(y)
        });
        let is_visible = self.virtual_tensor(x.sizes, DataType::Bool)?;
        self.add_pointwise(
            (PointwiseMode::CmpGe, None),
            DataType::Bool,
            [row?, is_visible],
            Some(column?),
            None,
        )?;
        let y = self.virtual_tensor(x.sizes, DataType::F32)?;
        self.add_pointwise(
            (PointwiseMode::BinarySelect, None),
            DataType::F32,
            [x, y],
            Some(masked),
            Some(is_visible),
        )?;
        Ok(y)
    }

    /// The first deterministic plan, in the order of the heuristics, that needs at most `max_workspace` bytes; `None` if there is
    /// none.
    pub(super) fn plan(self, max_workspace: u64) -> Result<Option<Plan>, DeviceError> {
        let graph = Descriptor::new(&self.library, DescriptorType::OperationGraph)?;
        graph.set(Attribute::GraphHandle, AttributeType::Handle, &[self.library.handle()])?;
        graph.set(Attribute::GraphOperations, AttributeType::BackendDescriptor, &self.operations)?;
        // A failure from here on means that the library does not support the graph.
        let Ok(graph) = graph.finalize() else { return Ok(None) };
        let heuristics = Descriptor::new(&self.library, DescriptorType::EngineHeuristics)?;
        heuristics.set(Attribute::HeuristicsGraph, AttributeType::BackendDescriptor, &[graph.object()])?;
        heuristics.set(Attribute::HeuristicsMode, AttributeType::HeuristicsMode, &[HEUR_MODE_A])?;
        let Ok(heuristics) = heuristics.finalize() else { return Ok(None) };
        let configs: Vec<Descriptor> = (0..ENGINES)
            .map(|_| Descriptor::new(&self.library, DescriptorType::EngineConfig))
            .collect::<Result<_, _>>()?;
        let mut found: Vec<Object> = configs.iter().map(Descriptor::object).collect();
        let Ok(count) =
            heuristics.get(Attribute::HeuristicsResults, AttributeType::BackendDescriptor, &mut found)
        else {
            return Ok(None);
        };
        for config in configs.iter().take(count) {
            if !is_deterministic(&self.library, config)? {
                continue;
            }
            let plan = Descriptor::new(&self.library, DescriptorType::ExecutionPlan)?;
            plan.set(Attribute::PlanHandle, AttributeType::Handle, &[self.library.handle()])?;
            plan.set(Attribute::PlanEngineConfig, AttributeType::BackendDescriptor, &[config.object()])?;
            let Ok(plan) = plan.finalize() else { continue };
            let mut bytes = [0i64];
            plan.get(Attribute::PlanWorkspaceSize, AttributeType::Int64, &mut bytes)?;
            if bytes[0].max(0) as u64 <= max_workspace {
                return Ok(Some(Plan { library: self.library, descriptor: plan, _parts: self.parts }));
            }
        }
        Ok(None)
    }
}

fn is_deterministic(library: &Arc<Cudnn>, config: &Descriptor) -> Result<bool, DeviceError> {
    let engine = Descriptor::new(library, DescriptorType::Engine)?;
    config.get(Attribute::EngineConfigEngine, AttributeType::BackendDescriptor, &mut [engine.object()])?;
    let mut notes = [0i32; NOTES];
    let count = engine.get(Attribute::EngineNumericalNotes, AttributeType::NumericalNote, &mut notes)?;
    Ok(!notes[..count].contains(&NOTE_NONDETERMINISTIC))
}

/// An execution plan of a graph.
pub(super) struct Plan {
    library: Arc<Cudnn>,
    descriptor: Descriptor,
    /// The plan refers to these.
    _parts: Vec<Descriptor>,
}

impl Plan {
    pub(super) const fn library(&self) -> &Arc<Cudnn> {
        &self.library
    }

    pub(super) const fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }
}
