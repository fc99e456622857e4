//! Function tables of NVIDIA's libraries, resolved at run time.
//!
//! cudarc's generated bindings are not used at run time, for two reasons. They open libraries themselves, by names of their own,
//! and panic if a library or a symbol is missing. And their functions return Rust enums: a status code that a newer library adds
//! would be undefined behaviour, while one binary must work with CUDA 12 and 13. Here a status is an integer. The signatures and
//! constants typed by hand are compared with cudarc's in a test.

/// Declares a struct with one function pointer per symbol, named as in the header. A function without a result type returns a
/// status (`c_int`). `$sys` is the module of cudarc that declares the same functions.
macro_rules! bindings {
    (@result) => { ::std::ffi::c_int };
    (@result $result:ty) => { $result };
    (@infer $argument:ty) => { _ };
    (
        $(#[$attribute:meta])*
        $name:ident: $sys:ident {
            $($symbol:ident($($argument:ty),* $(,)?) $(-> $result:ty)?;)*
        }
    ) => {
        $(#[$attribute])*
        #[derive(Clone, Copy)]
        #[allow(non_snake_case, reason = "fields are named as the functions in the header")]
        pub(crate) struct $name {
            $(pub(crate) $symbol: unsafe extern "C" fn($($argument),*) -> $crate::bindings::bindings!(@result $($result)?),)*
        }

        impl $name {
            /// Resolves all functions; an error names the first one that is missing.
            pub(crate) fn load(
                library: &$crate::library::Library,
            ) -> Result<Self, zeroth_kernel::DeviceError> {
                // SAFETY: each field has the type that the header declares for its symbol; a test compares them with cudarc's.
                unsafe { Ok(Self { $($symbol: library.function(stringify!($symbol))?,)* }) }
            }

            /// Compares every signature with cudarc's.
            #[cfg(test)]
            pub(crate) fn compare_with_cudarc() {
                use $crate::bindings::abi;
                $(assert_eq!(
                    abi::<unsafe extern "C" fn($($argument),*) -> $crate::bindings::bindings!(@result $($result)?)>(None),
                    abi(Some(cudarc::$sys::sys::$symbol as unsafe fn($($crate::bindings::bindings!(@infer $argument)),*) -> _)),
                    stringify!($symbol)
                );)*
            }
        }
    };
}
pub(crate) use bindings;

/// A function signature as the ABI sees it.
#[cfg(test)]
pub(crate) trait Signature {
    /// Layouts of the result and of the arguments.
    fn layouts() -> Vec<std::alloc::Layout>;
}

/// Layouts of the result and of the arguments of a function type, which a value may name.
#[cfg(test)]
pub(crate) fn abi<F: Signature>(_: Option<F>) -> Vec<std::alloc::Layout> {
    F::layouts()
}

#[cfg(test)]
mod tests {
    use std::alloc::Layout;

    use cudarc::{cublaslt, cudnn, driver, nccl};

    use super::Signature;
    use crate::cudnn::{Attribute, AttributeType, DataType, DescriptorType, PointwiseMode, Reduction};
    use crate::{compiler, cublaslt as lt, driver as cuda, gpu_uuid, graphs, ipc, nccl as nc, tensor_map};

    macro_rules! signatures {
        ($($argument:ident)*) => {
            impl<Result, $($argument),*> Signature for unsafe extern "C" fn($($argument),*) -> Result {
                fn layouts() -> Vec<Layout> {
                    vec![Layout::new::<Result>(), $(Layout::new::<$argument>()),*]
                }
            }
            impl<Result, $($argument),*> Signature for unsafe fn($($argument),*) -> Result {
                fn layouts() -> Vec<Layout> {
                    vec![Layout::new::<Result>(), $(Layout::new::<$argument>()),*]
                }
            }
        };
    }
    signatures!();
    signatures!(A);
    signatures!(A B);
    signatures!(A B C);
    signatures!(A B C D);
    signatures!(A B C D E);
    signatures!(A B C D E F);
    signatures!(A B C D E F G);
    signatures!(A B C D E F G H I J);
    signatures!(A B C D E F G H I J K);
    signatures!(A B C D E F G H I J K L);
    signatures!(A B C D E F G H I J K L M N O P);

    #[test]
    fn signatures_match_those_generated_from_the_headers() {
        cuda::Functions::compare_with_cudarc();
        graphs::Functions::compare_with_cudarc();
        ipc::Functions::compare_with_cudarc();
        gpu_uuid::Functions::compare_with_cudarc();
        tensor_map::Functions::compare_with_cudarc();
        compiler::Functions::compare_with_cudarc();
        lt::Functions::compare_with_cudarc();
        crate::cudnn::Functions::compare_with_cudarc();
        nc::Functions::compare_with_cudarc();
    }

    macro_rules! equal {
        ($($ours:expr => $theirs:expr;)*) => {
            $(assert_eq!($ours as i32, $theirs as i32, stringify!($theirs));)*
        };
    }

    #[test]
    fn constants_of_the_driver_match_those_generated_from_the_headers() {
        use driver::sys::*;
        equal! {
            cuda::DeviceAttribute::MultiprocessorCount => CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
            cuda::DeviceAttribute::ComputeCapabilityMajor => CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
            cuda::DeviceAttribute::ComputeCapabilityMinor => CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR;
            cuda::STREAM_NON_BLOCKING => CUstream_flags::CU_STREAM_NON_BLOCKING;
            cuda::EVENT_DEFAULT => CUevent_flags::CU_EVENT_DEFAULT;
            cuda::EVENT_DISABLE_TIMING => CUevent_flags::CU_EVENT_DISABLE_TIMING;
            cuda::MEMHOSTALLOC_PORTABLE => CU_MEMHOSTALLOC_PORTABLE;
            cuda::MEMHOSTALLOC_PORTABLE => CU_MEMHOSTREGISTER_PORTABLE;
            cuda::MAX_DYNAMIC_SHARED_SIZE_BYTES => CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            graphs::CAPTURE_MODE_RELAXED => CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
            ipc::LAZY_ENABLE_PEER_ACCESS => CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
            ipc::PORTABLE_DEVICEMAP => CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
            ipc::WAIT_VALUE_GEQ => CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ;
            tensor_map::FLOAT16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
            tensor_map::BFLOAT16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
            tensor_map::SWIZZLE_128B => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B;
            tensor_map::L2_PROMOTION_128B => CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
            nc::UINT8 => nccl::sys::ncclDataType_t::ncclUint8;
            nc::IN_PROGRESS => nccl::sys::ncclResult_t::ncclInProgress;
        }
    }

    #[test]
    fn the_configuration_of_nccl_is_laid_out_as_in_the_header() {
        use std::mem::offset_of;

        type Theirs = nccl::sys::ncclConfig_t;
        assert_eq!(size_of::<nc::Configuration>(), size_of::<Theirs>());
        assert_eq!(offset_of!(nc::Configuration, magic), offset_of!(Theirs, magic));
        assert_eq!(offset_of!(nc::Configuration, version), offset_of!(Theirs, version));
        assert_eq!(offset_of!(nc::Configuration, blocking), offset_of!(Theirs, blocking));
        assert_eq!(offset_of!(nc::Configuration, cga_cluster_size), offset_of!(Theirs, cgaClusterSize));
        assert_eq!(offset_of!(nc::Configuration, min_ctas), offset_of!(Theirs, minCTAs));
        assert_eq!(offset_of!(nc::Configuration, max_ctas), offset_of!(Theirs, maxCTAs));
        assert_eq!(offset_of!(nc::Configuration, net_name), offset_of!(Theirs, netName));
        assert_eq!(offset_of!(nc::Configuration, split_share), offset_of!(Theirs, splitShare));
    }

    #[test]
    fn constants_of_cublaslt_match_those_generated_from_the_headers() {
        use cublaslt::sys::*;
        equal! {
            lt::COMPUTE_32F => cublasComputeType_t::CUBLAS_COMPUTE_32F;
            lt::EPILOGUE_BIAS => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            lt::NOT_SUPPORTED => cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED;
            lt::REDUCTION_COMPUTE_TYPE => cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
            lt::data_type(0) => cudaDataType_t::CUDA_R_32F;
            lt::data_type(1) => cudaDataType_t::CUDA_R_16BF;
            lt::data_type(2) => cudaDataType_t::CUDA_R_16F;
            lt::MatmulAttribute::TransposeA => cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
            lt::MatmulAttribute::TransposeB => cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSB;
            lt::MatmulAttribute::Epilogue => cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_EPILOGUE;
            lt::MatmulAttribute::BiasPointer => cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
            lt::PreferenceAttribute::MaxWorkspaceBytes => cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            lt::PreferenceAttribute::ReductionSchemeMask => cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
            lt::PreferenceAttribute::MinAlignmentA => cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES;
            lt::PreferenceAttribute::MinAlignmentB => cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES;
            lt::PreferenceAttribute::MinAlignmentC => cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES;
            lt::PreferenceAttribute::MinAlignmentD => cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES;
        }
        assert_eq!(Layout::new::<lt::HeuristicResult>(), Layout::new::<cublasLtMatmulHeuristicResult_t>());
    }

    #[test]
    fn constants_of_cudnn_match_those_generated_from_the_headers() {
        use cudnn::sys::cudnnBackendAttributeName_t as Name;
        use cudnn::sys::cudnnBackendAttributeType_t as Type;
        use cudnn::sys::cudnnBackendDescriptorType_t as Descriptor;
        use cudnn::sys::*;
        equal! {
            DescriptorType::Pointwise => Descriptor::CUDNN_BACKEND_POINTWISE_DESCRIPTOR;
            DescriptorType::Engine => Descriptor::CUDNN_BACKEND_ENGINE_DESCRIPTOR;
            DescriptorType::EngineConfig => Descriptor::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR;
            DescriptorType::EngineHeuristics => Descriptor::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR;
            DescriptorType::ExecutionPlan => Descriptor::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR;
            DescriptorType::OperationPointwise => Descriptor::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR;
            DescriptorType::OperationGraph => Descriptor::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR;
            DescriptorType::VariantPack => Descriptor::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR;
            DescriptorType::Tensor => Descriptor::CUDNN_BACKEND_TENSOR_DESCRIPTOR;
            DescriptorType::Matmul => Descriptor::CUDNN_BACKEND_MATMUL_DESCRIPTOR;
            DescriptorType::OperationMatmul => Descriptor::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR;
            DescriptorType::Reduction => Descriptor::CUDNN_BACKEND_REDUCTION_DESCRIPTOR;
            DescriptorType::OperationReduction => Descriptor::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR;
            AttributeType::Handle => Type::CUDNN_TYPE_HANDLE;
            AttributeType::DataType => Type::CUDNN_TYPE_DATA_TYPE;
            AttributeType::Boolean => Type::CUDNN_TYPE_BOOLEAN;
            AttributeType::Int64 => Type::CUDNN_TYPE_INT64;
            AttributeType::VoidPtr => Type::CUDNN_TYPE_VOID_PTR;
            AttributeType::HeuristicsMode => Type::CUDNN_TYPE_HEUR_MODE;
            AttributeType::NumericalNote => Type::CUDNN_TYPE_NUMERICAL_NOTE;
            AttributeType::PointwiseMode => Type::CUDNN_TYPE_POINTWISE_MODE;
            AttributeType::BackendDescriptor => Type::CUDNN_TYPE_BACKEND_DESCRIPTOR;
            AttributeType::ReductionOperator => Type::CUDNN_TYPE_REDUCTION_OPERATOR_TYPE;
            Attribute::PointwiseMode => Name::CUDNN_ATTR_POINTWISE_MODE;
            Attribute::PointwiseMathPrecision => Name::CUDNN_ATTR_POINTWISE_MATH_PREC;
            Attribute::PointwiseAxis => Name::CUDNN_ATTR_POINTWISE_AXIS;
            Attribute::HeuristicsMode => Name::CUDNN_ATTR_ENGINEHEUR_MODE;
            Attribute::HeuristicsGraph => Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH;
            Attribute::HeuristicsResults => Name::CUDNN_ATTR_ENGINEHEUR_RESULTS;
            Attribute::EngineConfigEngine => Name::CUDNN_ATTR_ENGINECFG_ENGINE;
            Attribute::PlanHandle => Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE;
            Attribute::PlanEngineConfig => Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG;
            Attribute::PlanWorkspaceSize => Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE;
            Attribute::OperationPointwise => Name::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR;
            Attribute::OperationPointwiseX => Name::CUDNN_ATTR_OPERATION_POINTWISE_XDESC;
            Attribute::OperationPointwiseB => Name::CUDNN_ATTR_OPERATION_POINTWISE_BDESC;
            Attribute::OperationPointwiseY => Name::CUDNN_ATTR_OPERATION_POINTWISE_YDESC;
            Attribute::OperationPointwiseT => Name::CUDNN_ATTR_OPERATION_POINTWISE_TDESC;
            Attribute::GraphHandle => Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE;
            Attribute::GraphOperations => Name::CUDNN_ATTR_OPERATIONGRAPH_OPS;
            Attribute::TensorAlignment => Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT;
            Attribute::TensorDataType => Name::CUDNN_ATTR_TENSOR_DATA_TYPE;
            Attribute::TensorDimensions => Name::CUDNN_ATTR_TENSOR_DIMENSIONS;
            Attribute::TensorStrides => Name::CUDNN_ATTR_TENSOR_STRIDES;
            Attribute::TensorUniqueId => Name::CUDNN_ATTR_TENSOR_UNIQUE_ID;
            Attribute::TensorIsVirtual => Name::CUDNN_ATTR_TENSOR_IS_VIRTUAL;
            Attribute::TensorIsByValue => Name::CUDNN_ATTR_TENSOR_IS_BY_VALUE;
            Attribute::VariantPackIds => Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS;
            Attribute::VariantPackPointers => Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS;
            Attribute::VariantPackWorkspace => Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE;
            Attribute::EngineNumericalNotes => Name::CUDNN_ATTR_ENGINE_NUMERICAL_NOTE;
            Attribute::MatmulComputeType => Name::CUDNN_ATTR_MATMUL_COMP_TYPE;
            Attribute::OperationMatmulA => Name::CUDNN_ATTR_OPERATION_MATMUL_ADESC;
            Attribute::OperationMatmulB => Name::CUDNN_ATTR_OPERATION_MATMUL_BDESC;
            Attribute::OperationMatmulC => Name::CUDNN_ATTR_OPERATION_MATMUL_CDESC;
            Attribute::OperationMatmul => Name::CUDNN_ATTR_OPERATION_MATMUL_DESC;
            Attribute::ReductionOperator => Name::CUDNN_ATTR_REDUCTION_OPERATOR;
            Attribute::ReductionComputeType => Name::CUDNN_ATTR_REDUCTION_COMP_TYPE;
            Attribute::OperationReductionX => Name::CUDNN_ATTR_OPERATION_REDUCTION_XDESC;
            Attribute::OperationReductionY => Name::CUDNN_ATTR_OPERATION_REDUCTION_YDESC;
            Attribute::OperationReduction => Name::CUDNN_ATTR_OPERATION_REDUCTION_DESC;
            DataType::F32 => cudnnDataType_t::CUDNN_DATA_FLOAT;
            DataType::F16 => cudnnDataType_t::CUDNN_DATA_HALF;
            DataType::I32 => cudnnDataType_t::CUDNN_DATA_INT32;
            DataType::Bf16 => cudnnDataType_t::CUDNN_DATA_BFLOAT16;
            DataType::Bool => cudnnDataType_t::CUDNN_DATA_BOOLEAN;
            PointwiseMode::Add => cudnnPointwiseMode_t::CUDNN_POINTWISE_ADD;
            PointwiseMode::Mul => cudnnPointwiseMode_t::CUDNN_POINTWISE_MUL;
            PointwiseMode::Div => cudnnPointwiseMode_t::CUDNN_POINTWISE_DIV;
            PointwiseMode::Sub => cudnnPointwiseMode_t::CUDNN_POINTWISE_SUB;
            PointwiseMode::Exp => cudnnPointwiseMode_t::CUDNN_POINTWISE_EXP;
            PointwiseMode::Log => cudnnPointwiseMode_t::CUDNN_POINTWISE_LOG;
            PointwiseMode::CmpGe => cudnnPointwiseMode_t::CUDNN_POINTWISE_CMP_GE;
            PointwiseMode::GenIndex => cudnnPointwiseMode_t::CUDNN_POINTWISE_GEN_INDEX;
            PointwiseMode::BinarySelect => cudnnPointwiseMode_t::CUDNN_POINTWISE_BINARY_SELECT;
            Reduction::Add => cudnnReduceTensorOp_t::CUDNN_REDUCE_TENSOR_ADD;
            Reduction::Max => cudnnReduceTensorOp_t::CUDNN_REDUCE_TENSOR_MAX;
            crate::cudnn::HEUR_MODE_A => cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_A;
            crate::cudnn::NOTE_NONDETERMINISTIC => cudnnBackendNumericalNote_t::CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC;
        }
    }
}
