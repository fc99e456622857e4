//! The manifests and scripts of examples/cluster: fields that their schemas require, and commands that exist.

use std::fs;
use std::process::Command;

use saphyr_parser::{Event, Parser};
use serde_json::{Map, Value};

use crate::common::{root, zeroth};

fn text(name: &str) -> String {
    fs::read_to_string(root().join("examples/cluster").join(name)).unwrap()
}

/// A manifest: one document without references, with scalars as they are written.
fn manifest(name: &str) -> Value {
    let text = text(name);
    let mut events = Parser::new_from_str(&text);
    let mut next = || events.next().expect("an event").expect("YAML").0;
    loop {
        match next() {
            Event::StreamStart | Event::DocumentStart(_) | Event::Nothing => {}
            event => return node(event, &mut next),
        }
    }
}

fn node<'a>(event: Event<'a>, next: &mut impl FnMut() -> Event<'a>) -> Value {
    match event {
        Event::Scalar(text, ..) => Value::String(text.into_owned()),
        Event::SequenceStart(..) => {
            let mut items = Vec::new();
            loop {
                match next() {
                    Event::SequenceEnd => return Value::Array(items),
                    event => items.push(node(event, next)),
                }
            }
        }
        Event::MappingStart(..) => {
            let mut members = Map::new();
            loop {
                match next() {
                    Event::MappingEnd => return Value::Object(members),
                    key => {
                        let Value::String(key) = node(key, next) else { panic!("a key is a word") };
                        let value = next();
                        assert!(
                            members.insert(key.clone(), node(value, next)).is_none(),
                            "{key} stands twice"
                        );
                    }
                }
            }
        }
        event => panic!("{event:?} is in no manifest"),
    }
}

/// Panics unless an object has the required fields and no others than these.
fn check<'v>(value: &'v Value, required: &[&str], allowed: &[&str]) -> &'v Map<String, Value> {
    let object = value.as_object().unwrap_or_else(|| panic!("no object: {value}"));
    for field in required {
        assert!(object.contains_key(*field), "{field} is required: {value}");
    }
    for field in object.keys().map(String::as_str) {
        assert!(required.contains(&field) || allowed.contains(&field), "{field} is no field here: {value}");
    }
    object
}

fn words(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().map(|word| word.as_str().unwrap().to_owned()).collect()
}

/// A pod's template, by the required fields of `core/v1`; the command of its only container.
fn pod(template: &Value) -> Vec<String> {
    check(template, &["spec"], &["metadata"]);
    let spec = &template["spec"];
    check(spec, &["containers"], &["restartPolicy", "terminationGracePeriodSeconds", "volumes"]);
    let containers = spec["containers"].as_array().unwrap();
    assert_eq!(containers.len(), 1);
    let allowed = ["image", "command", "args", "env", "resources", "volumeMounts", "securityContext"];
    check(&containers[0], &["name"], &allowed);
    for variable in containers[0]["env"].as_array().into_iter().flatten() {
        check(variable, &["name"], &["value", "valueFrom"]);
        if let Some(secret) = variable["valueFrom"].get("secretKeyRef") {
            check(secret, &["key"], &["name", "optional"]);
        }
        if let Some(field) = variable["valueFrom"].get("fieldRef") {
            check(field, &["fieldPath"], &["apiVersion"]);
        }
    }
    let volumes: Vec<&str> = spec["volumes"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|volume| {
            check(volume, &["name"], &["emptyDir", "persistentVolumeClaim"])["name"].as_str().unwrap()
        })
        .collect();
    for mount in containers[0]["volumeMounts"].as_array().into_iter().flatten() {
        check(mount, &["name", "mountPath"], &["readOnly"]);
        assert!(volumes.contains(&mount["name"].as_str().unwrap()), "{mount} has no volume");
    }
    [words(&containers[0]["command"]), words(&containers[0]["args"])].concat()
}

/// Panics unless all flags of a command of ours are known. `train` is only resolved as far as its missing model.
fn check_command(words: &[String]) {
    let from = words.iter().position(|word| word == "zeroth").expect("a command of zeroth");
    let words: Vec<String> = words[from + 1..].iter().map(|word| word.replace("$(NODE)", "0")).collect();
    let train = words.iter().position(|word| word == "train").expect("it trains");
    let flags: Vec<&str> = words[train..].iter().map(String::as_str).collect();
    let found = zeroth(&[&flags[..], &["--dry-run"]].concat());
    assert_eq!(found.code, 2, "{}", found.stderr);
    assert!(found.stderr.contains("/data/"), "{}", found.stderr);
    if words[0] == "launch" {
        let help = zeroth(&["launch", "--help"]).stdout;
        for flag in words[1..train].iter().filter(|word| word.starts_with("--") && *word != "--") {
            let name = flag.split('=').next().unwrap();
            assert!(
                help.contains(&format!("{name} "))
                    || help.contains(&format!("{name}\n"))
                    || help.contains(&format!("{name}[")),
                "launch has no {name}"
            );
        }
    }
}

/// `jobset.x-k8s.io_jobsets.yaml` of kubernetes-sigs/jobset, and `batch/v1`.
#[test]
fn the_jobset_has_what_its_schema_requires() {
    let job_set = manifest("jobset.yaml");
    check(&job_set, &["apiVersion", "kind", "metadata", "spec"], &[]);
    assert_eq!(
        (&job_set["apiVersion"], &job_set["kind"]),
        (&"jobset.x-k8s.io/v1alpha2".into(), &"JobSet".into())
    );
    check(&job_set["spec"], &["replicatedJobs"], &["failurePolicy", "network", "successPolicy"]);
    check(&job_set["spec"]["failurePolicy"], &[], &["maxRestarts", "restartStrategy", "rules"]);
    let jobs = job_set["spec"]["replicatedJobs"].as_array().unwrap();
    let workers = check(&jobs[0], &["name", "template"], &["replicas"]);
    let job = &workers["template"]["spec"];
    check(job, &["template"], &["parallelism", "completions", "completionMode", "backoffLimit"]);
    assert_eq!((&job["completionMode"], &job["completions"]), (&"Indexed".into(), &job["parallelism"]));
    assert!(["Never", "OnFailure"].contains(&job["template"]["spec"]["restartPolicy"].as_str().unwrap()));
    let command = pod(&job["template"]);
    check_command(&command);
    // The first pod's name: that of the set, of the job, both indices, and the set's as subdomain.
    let name = job_set["metadata"]["name"].as_str().unwrap();
    let first = format!("--master-addr={name}-{}-0-0.{name}", workers["name"].as_str().unwrap());
    assert!(command.contains(&first), "{first}");
    assert!(command.contains(&format!("--nnodes={}", job["completions"].as_str().unwrap())));
}

/// `kubeflow.org_mpijobs.yaml` of kubeflow/mpi-operator.
#[test]
fn the_mpi_job_has_what_its_schema_requires() {
    let job = manifest("mpijob.yaml");
    check(&job, &["apiVersion", "kind", "metadata", "spec"], &[]);
    assert_eq!((&job["apiVersion"], &job["kind"]), (&"kubeflow.org/v2beta1".into(), &"MPIJob".into()));
    let spec = &job["spec"];
    check(
        spec,
        &["mpiReplicaSpecs"],
        &["slotsPerWorker", "mpiImplementation", "sshAuthMountPath", "runPolicy"],
    );
    assert!(["OpenMPI", "Intel", "MPICH"].contains(&spec["mpiImplementation"].as_str().unwrap()));
    check(&spec["runPolicy"], &[], &["cleanPodPolicy", "backoffLimit", "ttlSecondsAfterFinished"]);
    check(&spec["mpiReplicaSpecs"], &["Launcher", "Worker"], &[]);
    let replicas = |name: &str| {
        check(&spec["mpiReplicaSpecs"][name], &["template"], &["replicas", "restartPolicy"])["replicas"]
            .as_str()
            .unwrap()
            .parse::<u64>()
            .unwrap()
    };
    assert_eq!(replicas("Launcher"), 1);
    pod(&spec["mpiReplicaSpecs"]["Worker"]["template"]);
    let command = pod(&spec["mpiReplicaSpecs"]["Launcher"]["template"]);
    check_command(&command);
    let slots: u64 = spec["slotsPerWorker"].as_str().unwrap().parse().unwrap();
    let ranks = command.iter().skip_while(|word| *word != "-n").nth(1).unwrap();
    assert_eq!(*ranks, (replicas("Worker") * slots).to_string());
}

#[test]
fn the_batch_script_is_one_of_bash_and_its_command_exists() {
    let checked =
        Command::new("bash").arg("-n").arg(root().join("examples/cluster/train.sbatch")).output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    let script = text("train.sbatch").replace("\\\n", " ");
    let line = script.lines().find(|line| line.starts_with("srun ")).unwrap();
    let line: Vec<&str> = line.split("zeroth train").collect();
    let named = |variable: &str| format!("/data/{variable}");
    let words =
        ["zeroth", "train", "--model", &named("model"), "--data", &named("rows"), "--output", &named("run")];
    let rest = line[1].split("--deepspeed").nth(1).unwrap();
    let rest: Vec<String> = format!("--deepspeed{rest}").split_whitespace().map(str::to_owned).collect();
    check_command(&[words.map(str::to_owned).to_vec(), rest].concat());
    for option in ["--nodes=", "--ntasks-per-node=", "--gpus-per-node=", "--signal=USR1@"] {
        assert!(script.contains(&format!("\n#SBATCH {option}")), "{option}");
    }
}
