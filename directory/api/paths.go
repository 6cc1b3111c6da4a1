// SPDX-License-Identifier: Apache-2.0

package api

// Paths of the operator listener. All of them but the last three want the
// operator credential as a bearer token.
const (
	PathCells      = "/cells/v1/cells"      // GET -> CellList; GET, PUT {cell}: CellSpec -> Cell
	PathTenants    = "/cells/v1/tenants"    // GET ?cell= &after= &limit= -> TenantList; GET, DELETE {tenant}; PUT {tenant}/attributes; POST {tenant}/window/close
	PathPlacements = "/cells/v1/placements" // POST PlacementRequest -> Placement; on both listeners
	PathMoves      = "/cells/v1/moves"      // POST MoveRequest -> Move or DryRun; GET -> MoveList; GET {id}[?watch=1]; POST {id}/rollback; GET {id}/receipt
	PathBudgets    = "/cells/v1/budgets"    // GET -> BudgetList; PUT BudgetSpec; GET {tenant} -> cells.BudgetAccount; PUT {tenant} BudgetSpec; DELETE {tenant}
	PathCampaigns  = "/cells/v1/campaigns"  // POST CampaignRequest -> CampaignPlan; GET -> CampaignList; GET {id}, {id}/items, {id}/plan; PUT {id}/plan; POST {id}/run, pause, resume, abort
	PathRollouts   = "/cells/v1/rollouts"   // POST RolloutRequest -> RolloutPlan; GET -> RolloutList; GET {id}, {id}/units; POST {id}/pause, resume, abort
	PathMeasures   = "/cells/v1/measures"   // POST MeasureRequest -> Measured
	PathMembers    = "/cells/v1/members"    // GET -> MemberList
	// PathProvisioned: GET -> ProvisionedList; GET, PUT {cell}: ProvisionRequest -> Provisioned;
	// POST {cell}/upgrade, {cell}/drain, {cell}/retire -> Provisioned.
	PathProvisioned = "/cells/v1/provisioned"
	PathVersions    = "/cells/v1/versions" // GET -> VersionList; PUT {name} VersionRequest -> provision.Version; DELETE {name}
	PathAudit       = "/cells/v1/audit"    // GET ?after= &limit= &tenant= -> AuditList
	PathLive        = "/livez"
	PathReady       = "/readyz"
	PathMetrics     = "/metrics"
)

// Paths of the channel listener, beside those of package member.
const (
	// PathTopology answers a Topology, or with ?watch=1 an unending stream of
	// TopologyLine, one JSON document a line.
	PathTopology = "/cells/v1/topology"
	// PathSeen takes a SeenReport from an edge, and answers {}.
	PathSeen = "/cells/v1/seen"
	// PathSpecs answers a SpecList to a provisioner, or with ?watch=1 an unending stream
	// of SpecLine. PathSpecStatus takes a provision.Status and answers {}; PathLiving
	// with ?cell= answers a LivingList.
	PathSpecs      = "/cells/v1/provision/specs"
	PathSpecStatus = "/cells/v1/provision/status"
	PathLiving     = "/cells/v1/provision/living"
	// PathVitals takes a VitalsReport from an edge, and answers {}.
	PathVitals = "/cells/v1/vitals"
)

// HeaderRequestID names a request in the audit. A caller may send its own, 1 to
// 64 bytes of [A-Za-z0-9._-]; otherwise the directory makes one. It is echoed.
const HeaderRequestID = "Cell-Request-Id"

// Bounds of requests and pages.
const (
	// MaxBody is the largest request body, in bytes.
	MaxBody = 64 << 10
	// DefaultPage and MaxPage bound lists.
	DefaultPage = 100
	MaxPage     = 1000
	// MaxText bounds actors, reasons and operation ids, in bytes.
	MaxText = 256
)

// ContentJSON and ContentNDJSON are the content types of answers.
const (
	ContentJSON   = "application/json"
	ContentNDJSON = "application/x-ndjson"
)
