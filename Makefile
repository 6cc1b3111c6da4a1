# SPDX-License-Identifier: Apache-2.0
# Two commands do everything: make demo, make test. `make` lists the rest.

GO       ?= go
BIN      := bin
VERSION  ?= $(shell git describe --always --dirty 2>/dev/null || echo dev)
LDFLAGS  := -s -w -X main.version=$(VERSION)
# SQLite's C, as Go, shares no memory with ours but through its driver, which is watched. To watch it as well takes four times as long.
RACE     ?= -race -gcflags=modernc.org/sqlite/lib=-race=false
export CGO_ENABLED ?= 1
# Packages with hot paths: what they allocate is compared without the race detector.
ALLOCS   = $(addprefix ./,$(patsubst %/testdata/,%,$(dir $(shell git ls-files '*/testdata/allocs.txt'))))

.DEFAULT_GOAL := help

help: ## list what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

build: ## build bin/cell and bin/memory
	@mkdir -p $(BIN)
	$(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $(BIN)/cell ./cmd/cell
	cd services && $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o ../$(BIN)/memory ./memory/cmd/memory

demo: build ## start a fleet, place two tenants, move one under load; Ctrl-C ends it
	$(BIN)/cell dev --demo $(DEMO_ARGS)

demo-postgres: build postgres ## the same with a private Postgres cluster for each cell
	$(BIN)/cell dev --demo --store postgres --fleet .cell-postgres $(DEMO_ARGS)

test: postgres clickhouse languages lint ## everything that CI runs
	$(GO) test $(RACE) -timeout 20m ./...
	EDGE_FAST_PATH=on $(GO) test $(RACE) -timeout 10m ./edge # once more, with the fast path
	$(GO) test -timeout 10m ./cmd/cell/schedule
	$(MAKE) allocs
	cd services && $(GO) test $(RACE) -timeout 10m ./...
	cd table/realtest && $(GO) test $(RACE) -timeout 10m ./etcdtest/...
	cd member/stores/realtest && $(GO) test -timeout 10m ./...
	cd table/realtest && $(GO) test -timeout 10m ./kubetest/... # Kubernetes' own log has races

allocs: ## allocations of the hot paths beside the kept ones (testdata/allocs.txt)
	$(GO) test -count=1 -run '^TestAllocs$$' $(ALLOCS)

keep-allocs: ## accept what the hot paths allocate now
	CELL_KEEP_ALLOCS=1 $(GO) test -count=1 -run '^TestAllocs$$' $(ALLOCS)

test-quick: lint ## without the race detector and without the long runs
	$(GO) test -short ./...
	cd services && $(GO) test -short ./...
	cd table/realtest && $(GO) test -short ./...
	cd member/stores/realtest && $(GO) test -short ./...

lint: ## gofmt, go vet, generated files are current
	@bad=$$(gofmt -l $$(git ls-files '*.go')); if [ -n "$$bad" ]; then echo "gofmt: $$bad"; exit 1; fi
	$(GO) vet ./...
	cd services && $(GO) vet ./...
	cd table/realtest && $(GO) vet ./...
	cd member/stores/realtest && $(GO) vet ./...

docs: build ## write the CLI reference again
	$(BIN)/cell docs --dir docs/cli

postgres: ## install Debian's Postgres server if it is missing
	@scripts/need-postgres

clickhouse: ## install Debian's ClickHouse server if it is missing
	@scripts/need-clickhouse

nginx: ## install Debian's nginx if it is missing
	@scripts/need-benched nginx

haproxy: ## install Debian's HAProxy if it is missing
	@scripts/need-benched haproxy

languages: ## install what the examples in Python and Node need
	@scripts/need-python
	@scripts/need-node

bench-move: build postgres ## the pause and the copy rate of moves under load, on both stores
	$(BIN)/cell bench move --store sqlite
	$(BIN)/cell bench move --store postgres

bench-campaign: build postgres ## moves a second of campaigns of many small tenants, on both stores
	$(BIN)/cell bench campaign --store sqlite
	$(BIN)/cell bench campaign --store postgres

bench-pause: build postgres ## pauses over {1e3, 1e5, 1e6} rows x {10, 1000, max} writes a second on both stores; writes docs/pause.svg (more than an hour)
	$(BIN)/cell bench pause --out docs/pause.svg

bench-copy: build postgres ## rows of a large tenant from one Postgres database to another, beside psql's COPY (ROWS=1000000)
	$(BIN)/cell bench copy --rows $(or $(ROWS),1000000)

bench-catchup: build postgres ## changes of a tenant applied at the other cell, beside a native subscription and decoding alone
	$(BIN)/cell bench catchup

bench-fence: postgres ## candidates for the fence's locking, side by side
	$(GO) test ./guard/postgres -run '^$$' -bench BenchmarkFence -benchtime 2s -count 5

bench-edge: nginx haproxy ## HTTP/1.1: CPU per request of the edge beside nginx, HAProxy and httputil.ReverseProxy (ROUNDS=7 REQUESTS=10000)
	$(GO) build -trimpath -o $(BIN)/edgebench ./cmd/edgebench
	$(BIN)/edgebench http --rounds $(or $(ROUNDS),7) --requests $(or $(REQUESTS),10000)

bench-edge-grpc: nginx haproxy ## the same for gRPC over HTTP/2, and for TLS 1.3
	$(GO) build -trimpath -o $(BIN)/edgebench ./cmd/edgebench
	$(BIN)/edgebench grpc --rounds $(or $(ROUNDS),7) --requests $(or $(REQUESTS),10000)
	$(BIN)/edgebench tls --rounds $(or $(ROUNDS),7) --requests $(or $(REQUESTS),10000)

bench-plan: ## what a plan for a million tenants costs, by policy
	$(GO) test ./cells -run '^$$' -bench BenchmarkPlan -benchtime 3x

bench-compare: ## Go benchmarks at BASE and here, in turns, through benchstat (BASE=main~1 PACKAGES="./cells ./edge/extract" BENCH=Lookup ROUNDS=7)
	scripts/bench-compare "$(BASE)" "$(or $(PACKAGES),./cells ./edge/extract)" "$(or $(BENCH),.)" "$(or $(ROUNDS),7)"

bench-directory: postgres ## claims and reads of the directory beside bare statements on the same Postgres (ROUNDS=7, SIZES=all for ten million tenants)
	$(GO) test ./directory/postgres -run '^$$' -bench BenchmarkDirectory -benchtime 1x -timeout 1h

claimers: postgres ## 64 claimers at 3 router replicas on one Postgres, 10,000 new tenants, quotas in force (CLAIMERS=64 TENANTS=10000)
	CELL_CLAIMERS=$(or $(CLAIMERS),64) CELL_CLAIM_TENANTS=$(or $(TENANTS),10000) $(GO) test ./directory/deploy/httpapi -run 'TestClaimers$$' -count=1 -v -timeout 1h

adoption: postgres ## docs/adoption.md, every command of it, with clients throughout (RUNS=10)
	CELL_ADOPTION_RUNS=$(or $(RUNS),10) $(GO) test ./cmd/cell/e2e -run 'TestAdoption$$' -count=1 -v -timeout 2h

faults: postgres ## every fault at every step of moves, undos, campaigns, rollouts on both stores (more than an hour; OPS=undo,campaign FAULTS=disk-full,kill STORE=postgres); writes docs/faults.md when all faults and stores are in it
	CELL_FAULTS=all CELL_FAULTS_OPS=$(OPS) CELL_FAULTS_ONLY=$(FAULTS) CELL_FAULTS_STORE=$(STORE) CELL_FAULTS_OUT=$(if $(FAULTS)$(STORE),,$(CURDIR)/docs/faults.md) $(GO) test ./cmd/cell/e2e -run 'TestFaultMatrix$$' -count=1 -timeout 4h

schedules: ## seeded schedules of trouble (SCHEDULES=10000, SEED=1)
	CELL_SCHEDULES=$(or $(SCHEDULES),10000) CELL_SEED=$(or $(SEED),1) $(GO) test ./cmd/cell/schedule -run 'TestSchedules$$' -count=1 -v -timeout 24h

fuzz: ## every fuzz target for a while (FUZZTIME=30s)
	scripts/fuzz $(or $(FUZZTIME),30s)

clean: ## remove what was built and the dev fleet's state
	rm -rf $(BIN) .cell .cell-postgres

.PHONY: adoption bench-directory claimers help build demo demo-postgres test test-quick lint docs postgres clickhouse languages bench-move bench-campaign bench-fence bench-edge bench-plan bench-compare allocs keep-allocs faults schedules fuzz clean nginx haproxy bench-edge-grpc
