//! The parameters of a forward by their names in the table, with the adapters of its linear maps.

use std::collections::HashMap;

use zeroth_graph::{Builder, GraphError, ParamId, ParamSpec, Routing, Value};

use super::error::ForwardError;
use crate::table::AdapterScales;
use crate::{LinearModule, Parameter, ParameterKind, ParameterTable, ParameterUnit};

/// A unit's parameters as the graph declares them, under the names that `rename` gives them.
pub(super) fn param_specs(
    unit: &ParameterUnit,
    is_trained: &dyn Fn(&Parameter) -> bool,
    rename: impl Fn(&str) -> String,
) -> Vec<ParamSpec> {
    let spec = |parameter: &Parameter| {
        let trainable = is_trained(parameter);
        let (name, shape) = (rename(&parameter.name), parameter.shape.clone());
        ParamSpec { name, shape, trainable, quantized: parameter.quantized && !trainable }
    };
    unit.parameters.iter().map(spec).collect()
}

/// The parameters of a model by their names in its table, and the adapters of its linear maps.
pub(super) struct NamedParams<'a> {
    /// What the graph's names have before those of the table.
    prefix: &'static str,
    adapters: Option<AdapterScales>,
    matrices: HashMap<&'a str, [Option<&'a Parameter>; 2]>,
}

impl<'a> NamedParams<'a> {
    pub(super) fn new(table: &'a ParameterTable, prefix: &'static str) -> Self {
        Self { prefix, adapters: table.adapters, matrices: table.adapter_matrices() }
    }

    pub(super) fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    pub(super) fn get(&self, b: &Builder, name: &str) -> Result<ParamId, GraphError> {
        b.param(&self.name(name))
    }

    /// How the adapter of a matrix acts, with its inner and outer matrix; `None` where it has no adapter.
    pub(super) fn adapter(
        &self,
        b: &Builder,
        weight: &str,
    ) -> Result<Option<(AdapterScales, [ParamId; 2])>, ForwardError> {
        let (Some(adapters), Some(matrices)) = (self.adapters, self.matrices.get(weight)) else {
            return Ok(None);
        };
        match matrices {
            [Some(inner), Some(outer)] => {
                Ok(Some((adapters, [self.get(b, &inner.name)?, self.get(b, &outer.name)?])))
            }
            [Some(lone), None] | [None, Some(lone)] => {
                Err(ForwardError::LoneMatrix { name: lone.name.clone() })
            }
            [None, None] => Ok(None),
        }
    }

    /// A unit's first parameter of a kind.
    pub(super) fn of_kind(
        &self,
        b: &Builder,
        unit: &ParameterUnit,
        kind: ParameterKind,
    ) -> Result<Option<ParamId>, GraphError> {
        let found = unit.parameters.iter().find(|parameter| parameter.kind == kind);
        found.map(|parameter| self.get(b, &parameter.name)).transpose()
    }

    /// A linear map, with its bias and adapter where it has them.
    pub(super) fn linear(
        &self,
        b: &mut Builder,
        linear: &LinearModule,
        x: Value,
    ) -> Result<Value, ForwardError> {
        let LinearModule { name: module, bias, .. } = linear;
        let name = format!("{module}.weight");
        let weight = self.get(b, &name)?;
        let bias = if *bias { Some(self.get(b, &format!("{module}.bias"))?) } else { None };
        let y = b.linear(x, weight, bias)?;
        let Some((adapters, [inner, outer])) = self.adapter(b, &name)? else { return Ok(y) };
        let dropped = b.dropout(x, adapters.dropout)?;
        let u = b.linear(dropped, inner, None)?; // [T, rank]
        Ok(b.linear_add(y, u, outer, adapters.scale)?)
    }

    /// The linear maps of all experts, with their adapters where they have them; `scale` is that of the adapters.
    pub(super) fn grouped_linear(
        &self,
        b: &mut Builder,
        name: &str,
        x: Value,
        routing: &Routing,
        scale: fn(AdapterScales) -> f64,
    ) -> Result<Value, ForwardError> {
        let weight = self.get(b, name)?;
        let y = b.grouped_linear(x, weight, routing)?;
        let Some((adapters, [inner, outer])) = self.adapter(b, name)? else { return Ok(y) };
        let u = b.grouped_linear(x, inner, routing)?; // [T · k, rank]
        Ok(b.grouped_linear_add(y, u, outer, scale(adapters), routing)?)
    }
}
