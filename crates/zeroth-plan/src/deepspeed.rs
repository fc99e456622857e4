//! DeepSpeed's own memory estimators, for comparison.
//!
//! `estimate_zero2_model_states_mem_needs` and `estimate_zero3_model_states_mem_needs` of DeepSpeed 0.19.6. They count
//! model states (and the largest layer for ZeRO-3), without activations and buckets. This is integer arithmetic,
//! DeepSpeed's is floating-point: beyond 2^53 bytes the last digits may differ.

use serde::Serialize;
use std::fmt;

/// DeepSpeed's `additional_buffer_factor` of 1.5, as a fraction.
const BUFFER_FACTOR: (u128, u128) = (3, 2);

/// DeepSpeed's estimate for a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Estimate {
    /// Bytes on each GPU.
    pub gpu_bytes: u64,
    /// Bytes of each host.
    pub cpu_bytes: u64,
}

/// The cluster, as DeepSpeed's estimators take it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cluster {
    /// GPUs of one node, at least 1.
    pub gpus_per_node: u64,
    /// Nodes, at least 1.
    pub nodes: u64,
}

/// ZeRO-3's offload options, and whether weights are sharded at construction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Zero3Options {
    /// `offload_optimizer` is "cpu".
    pub optimizer: bool,
    /// `offload_param` is "cpu". Effective only with `offload_optimizer`.
    pub parameters: bool,
    /// `zero.Init`: without it every process builds the whole model in host memory first.
    pub zero_init: bool,
}

/// A line of the table that DeepSpeed prints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EstimateLine {
    /// The estimate.
    pub need: Estimate,
    /// The options, as DeepSpeed writes them.
    pub options: String,
}

impl fmt::Display for EstimateLine {
    /// Its "GB" are GiB.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
        let (cpu, gpu) = (gib(self.need.cpu_bytes), gib(self.need.gpu_bytes));
        write!(f, " {cpu:7.2}GB | {gpu:6.2}GB | {}", self.options)
    }
}

/// `estimate_zero2_model_states_mem_needs`.
pub fn zero2(params: u64, cluster: Cluster, offload_optimizer: bool) -> Estimate {
    let (gpus_per_node, nodes) = cluster.counts();
    let (p, gpus) = (u128::from(params), gpus_per_node.saturating_mul(nodes));
    if offload_optimizer {
        let per_param = gpus.saturating_mul(4).max(16);
        need(p.saturating_mul(2), buffered(p.saturating_mul(per_param), 1))
    } else {
        // 18: gradients 2 and 4, master parameters 4, moments 8.
        let gpu = p.saturating_mul(2).saturating_add(p.saturating_mul(18) / gpus);
        need(gpu, buffered(p.saturating_mul(4).saturating_mul(gpus_per_node), 1))
    }
}

/// `estimate_zero3_model_states_mem_needs`.
pub fn zero3(params: u64, largest_layer: u64, cluster: Cluster, options: Zero3Options) -> Estimate {
    let (gpus_per_node, nodes) = cluster.counts();
    let (p, gpus) = (u128::from(params), gpus_per_node.saturating_mul(nodes));
    let layer = u128::from(largest_layer).saturating_mul(4);
    if !options.optimizer {
        let built = if options.zero_init { u128::from(largest_layer) } else { p };
        let gpu = layer.saturating_add(p.saturating_mul(18) / gpus);
        return need(gpu, buffered(built.saturating_mul(4).saturating_mul(gpus_per_node), 1));
    }
    let (gpu, per_param) =
        if options.parameters { (layer, 18) } else { (layer.saturating_add(p.saturating_mul(2) / gpus), 16) };
    // max(4 · GPUs of a node, 18 / nodes): both over the same denominator.
    let per_param = if options.zero_init {
        per_param
    } else {
        gpus_per_node.saturating_mul(4).saturating_mul(nodes).max(per_param)
    };
    need(gpu, buffered(p.saturating_mul(per_param), nodes))
}

/// The lines of `estimate_zero2_model_states_mem_needs_all_cold`, in DeepSpeed's order.
pub fn zero2_lines(params: u64, cluster: Cluster) -> Vec<EstimateLine> {
    [true, false]
        .map(|optimizer| EstimateLine {
            need: zero2(params, cluster, optimizer),
            options: format!("offload_optimizer={}", device(optimizer)),
        })
        .into()
}

/// The lines of `estimate_zero3_model_states_mem_needs_all_cold`, in DeepSpeed's order.
pub fn zero3_lines(params: u64, largest_layer: u64, cluster: Cluster) -> Vec<EstimateLine> {
    let mut lines = Vec::new();
    for (optimizer, parameters) in [(true, true), (true, false), (false, false)] {
        for zero_init in [true, false] {
            let options = Zero3Options { optimizer, parameters, zero_init };
            lines.push(EstimateLine {
                need: zero3(params, largest_layer, cluster, options),
                options: format!(
                    "offload_param={}, offload_optimizer={}, zero_init={}",
                    device(parameters),
                    device(optimizer),
                    u8::from(zero_init)
                ),
            });
        }
    }
    lines
}

impl Cluster {
    fn counts(self) -> (u128, u128) {
        (u128::from(self.gpus_per_node.max(1)), u128::from(self.nodes.max(1)))
    }
}

fn device(offloaded: bool) -> &'static str {
    if offloaded { "cpu " } else { "none" }
}

fn buffered(bytes: u128, divisor: u128) -> u128 {
    bytes.saturating_mul(BUFFER_FACTOR.0) / BUFFER_FACTOR.1.saturating_mul(divisor)
}

fn need(gpu: u128, cpu: u128) -> Estimate {
    let narrow = |bytes: u128| u64::try_from(bytes).unwrap_or(u64::MAX);
    Estimate { gpu_bytes: narrow(gpu), cpu_bytes: narrow(cpu) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// t5-3b on one node of 8 GPUs, as in DeepSpeed's memory documentation.
    const T5_3B: (u64, u64) = (2_851_598_336, 32_899_072);
    const NODE: Cluster = Cluster { gpus_per_node: 8, nodes: 1 };

    #[test]
    fn zero3_lines_are_those_of_deepspeeds_documentation() {
        let lines: Vec<String> =
            zero3_lines(T5_3B.0, T5_3B.1, NODE).iter().map(EstimateLine::to_string).collect();
        assert_eq!(
            lines,
            [
                "   71.71GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1",
                "  127.48GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0",
                "   63.74GB |   0.79GB | offload_param=none, offload_optimizer=cpu , zero_init=1",
                "  127.48GB |   0.79GB | offload_param=none, offload_optimizer=cpu , zero_init=0",
                "    1.47GB |   6.10GB | offload_param=none, offload_optimizer=none, zero_init=1",
                "  127.48GB |   6.10GB | offload_param=none, offload_optimizer=none, zero_init=0",
            ]
        );
    }

    #[test]
    fn zero2_lines_are_what_its_code_computes() {
        let lines: Vec<String> = zero2_lines(T5_3B.0, NODE).iter().map(EstimateLine::to_string).collect();
        assert_eq!(
            lines,
            [
                "  127.48GB |   5.31GB | offload_optimizer=cpu ",
                "  127.48GB |  11.29GB | offload_optimizer=none"
            ]
        );
    }

    /// 2 nodes of 4: 2P + 18P/8 on a GPU; the host of ZeRO-3 holds half of 18P, times 1.5.
    #[test]
    fn nodes_share_what_hosts_hold() {
        let cluster = Cluster { gpus_per_node: 4, nodes: 2 };
        let options = Zero3Options { optimizer: true, parameters: true, zero_init: true };
        assert_eq!(
            zero2(1_000_000, cluster, false),
            Estimate { gpu_bytes: 4_250_000, cpu_bytes: 24_000_000 }
        );
        assert_eq!(zero3(1_000_000, 10, cluster, options), Estimate { gpu_bytes: 40, cpu_bytes: 13_500_000 });
        let whole = Zero3Options { zero_init: false, ..options };
        assert_eq!(zero3(1_000_000, 10, cluster, whole).cpu_bytes, 24_000_000);
    }
}
