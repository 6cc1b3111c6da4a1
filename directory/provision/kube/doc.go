// SPDX-License-Identifier: Apache-2.0

// Package kube makes cells of Kubernetes objects: a [provision.Provisioner] that
// applies them server-side, and [Render], which writes the same manifests.
//
// # Who is authoritative
//
// The directory is authoritative for the specs, the API server for what is there. All
// objects of a cell are applied under one field manager ([Manager]), which owns exactly
// the fields that [Objects] has: what others set beside them (a sidecar injector's
// container, an annotation) is left alone. A field of ours that somebody else owns is a
// conflict: it is refused, with the fields named, unless Config.Force takes them over.
//
// # Objects
//
//	ServiceAccount        without a token: cells do not speak to the API server
//	ConfigMap             what every process of the cell is told
//	Service               headless; names, for people and for the StatefulSet
//	NetworkPolicy         only edges reach the service, only directories and cells the agents
//	PodDisruptionBudget   at most one process at a time is taken away on purpose
//	Deployment            of cells without a store, or with a Postgres database: rolling, a new
//	                      process is ready before an old one is told to leave
//	StatefulSet           of cells with an SQLite store: one process, one volume
//
// Secrets are referred to and never written: cell-<cell>-channel with tls.crt, tls.key
// and ca.crt (cell pki issue), cell-<cell>-admission with admission.key, and what the
// spec names. They stay when a cell is retired.
//
// # Limits
//
// An SQLite store is one file on one volume, which one process has at a time: such a
// cell has one replica, and its upgrade ends the old process before the new one
// starts. Edges hold requests meanwhile, within their bounds. A Postgres database is
// not made here: the spec refers to its connection string, which the processes get in
// CELL_STORE_DSN and as {dsn}. KeepStore keeps the volume's claim.
//
// # Failures
//
// Every call may be repeated and may be killed anywhere: applying is idempotent, waiting
// changes nothing, deleting what is gone is success. A version that does not become
// ready fails the call after ReadyWithin; the Deployment keeps the old processes, and the
// next spec replaces it. Objects of the names that carry no label of the cell are
// somebody else's, and are neither changed nor deleted. An API server that is away fails
// the call, which is repeated.
package kube
