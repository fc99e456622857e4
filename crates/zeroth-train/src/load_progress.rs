//! Progress of loading weights.

use zeroth_model::ParameterTable;

/// Tracks loaded elements. Parameters count as if concatenated; a rank reads only its shard of each, so the last
/// report may fall short of the total.
pub(crate) struct LoadProgress<'a> {
    /// Offset of each parameter, by its index in the program.
    starts: Vec<u64>,
    each: u64,
    total: u64,
    /// Elements of the completed states.
    before: u64,
    furthest: u64,
    report: &'a mut dyn FnMut(u64, u64),
}

impl<'a> LoadProgress<'a> {
    /// Tracks the parameters `names` in `states` states each; `report` is called with loaded and total elements.
    pub(crate) fn new(
        table: &ParameterTable,
        names: &[String],
        states: usize,
        report: &'a mut dyn FnMut(u64, u64),
    ) -> Self {
        let known = table.by_name();
        let size = |name: &String| known.get(name.as_str()).map_or(0, |parameter| parameter.elements());
        let mut each = 0;
        let start = |name: &String| {
            let start = each;
            each += size(name);
            start
        };
        let starts = names.iter().map(start).collect();
        Self { starts, each, total: each * states as u64, before: 0, furthest: 0, report }
    }

    /// Reports that a parameter is loaded up to element `end`.
    pub(crate) fn loaded(&mut self, parameter: usize, end: u64) {
        let at = self.before + self.starts.get(parameter).map_or(0, |start| start + end);
        // Parameters may be loaded out of order.
        self.furthest = self.furthest.max(at).min(self.total);
        (self.report)(self.furthest, self.total);
    }

    /// Starts the next state.
    pub(crate) fn next_state(&mut self) {
        self.before += self.each;
    }
}

#[cfg(test)]
mod tests {
    use zeroth_model::{ModelConfig, Parameter, table};

    use super::*;

    #[test]
    fn progress_is_monotonic_and_ends_at_the_total() {
        let config = serde_json::json!({
            "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 1, "intermediate_size": 8, "vocab_size": 16, "max_position_embeddings": 8,
            "rms_norm_eps": 1e-5,
        });
        let serde_json::Value::Object(map) = config else { unreachable!() };
        let table = table(&ModelConfig::from_map(&map, "config.json").unwrap());
        let names: Vec<String> = table.iter().map(|parameter| parameter.name.clone()).collect();
        let sizes: Vec<u64> = table.iter().map(Parameter::elements).collect();
        let mut reports = Vec::new();
        let mut report = |done, total| reports.push((done, total));
        let mut progress = LoadProgress::new(&table, &names, 2, &mut report);
        for state in 0..2 {
            if state > 0 {
                progress.next_state();
            }
            // The first parameter is loaded last, like a tied embedding.
            for parameter in (1..names.len()).chain([0]) {
                progress.loaded(parameter, sizes[parameter]);
            }
        }
        assert!(reports.is_sorted(), "{reports:?}");
        let total = 2 * table.total();
        assert_eq!(reports.last(), Some(&(total, total)));
    }
}
