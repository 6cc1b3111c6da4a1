// SPDX-License-Identifier: Apache-2.0

package cells_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"

	"github.com/cloister-dev/cloister/cells"
)

// The stateless profile in one process: a table in a file, a router, the gates of
// one cell on the request path, and the moves of a fleet that owns no state.
func Example() {
	dir, err := os.MkdirTemp("", "cells")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	ctx := context.Background()
	path := filepath.Join(dir, "cell-routes.json")

	table := cells.NewFileTable(path) // or NewMemTable for tests
	router := cells.NewRouter(table, cells.WithDefaultCell("default"))
	_ = router.Start(ctx)
	defer router.Close()
	gates := cells.NewGates("cell-a", router)

	// L1+L2 on the request path:
	grpcServer := grpc.NewServer(grpc.UnaryInterceptor(
		cells.UnaryServerInterceptor(router, gates)))
	defer grpcServer.Stop()

	// Operate moves:
	ctrl := cells.NewMoveController(table,
		cells.WithBudgetMeter(cells.NewBudgetMeter()),
		cells.WithDrainDeadline(10*time.Second))
	_ = ctrl.Assign(ctx, "tenant-7", "cell-a", "alice") // sticky first placement
	_ = ctrl.Move(ctx, cells.MovePlan{TenantID: "tenant-7", FromCell: "cell-a", ToCell: "cell-b"})

	route, _ := router.Wait(ctx, "tenant-7", 0)
	for !route.Serving() || route.CellID != "cell-b" {
		route, _ = router.Wait(ctx, "tenant-7", route.Revision)
	}
	fmt.Println(route.TenantID, route.State, route.CellID, "epoch", route.Epoch)

	// Rebalance many tenants under a placement policy:
	tenants := []cells.TenantID{"tenant-7", "tenant-8", "tenant-9"}
	cellIDs := []cells.CellID{"cell-a", "cell-b"}
	_ = ctrl.Assign(ctx, "tenant-8", "cell-a", "alice")
	_ = ctrl.Assign(ctx, "tenant-9", "cell-a", "alice")
	camp := cells.NewCampaign(ctrl)
	plan, _ := cells.PlanFromPolicy(ctx, tenants, cells.RoundRobinPolicy(cellIDs), nil)
	_, _ = camp.Run(ctx, plan)

	for _, t := range tenants {
		route, _ := router.Refresh(ctx, t)
		fmt.Println(t, "in", route.CellID)
	}
	fmt.Println("tenant-1 in", router.Lookup("tenant-1").Cell)
	// Output:
	// tenant-7 ACTIVE cell-b epoch 3
	// tenant-7 in cell-a
	// tenant-8 in cell-b
	// tenant-9 in cell-a
	// tenant-1 in default
}

// A service behind an edge: requests carry the tenant and the epoch that they were
// routed by.
func ExampleHTTPMiddleware() {
	ctx := context.Background()
	table := cells.NewMemTable()
	_ = cells.NewMoveController(table).Assign(ctx, "acme", "cell-a", "alice")
	router := cells.NewRouter(table)
	if err := router.Start(ctx); err != nil {
		panic(err)
	}
	defer router.Close()
	gates := cells.NewGates("cell-a", router)

	service := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a, _ := cells.AdmissionFromContext(r.Context())
		fmt.Fprintf(w, "hello %s at epoch %d", a.Tenant, a.Epoch)
	})
	handler := cells.HTTPMiddleware(router, gates)(service)

	for _, tenant := range []string{"acme", "nobody"} {
		r := httptest.NewRequest("GET", "/v1/hello", nil)
		r.Header.Set(cells.HeaderTenant, tenant)
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		if a, ok := cells.ReadProblem(w.Result()); ok {
			fmt.Println(w.Code, a.Code)
			continue
		}
		fmt.Println(w.Code, w.Body)
	}
	// Output:
	// 200 hello acme at epoch 1
	// 404 UNKNOWN_TENANT
}

// A job takes an admission as a request does, and stops when the tenant leaves.
func ExampleGates_Admit() {
	ctx := context.Background()
	table := cells.NewMemTable()
	ctrl := cells.NewMoveController(table)
	_ = ctrl.Assign(ctx, "acme", "cell-a", "alice")
	router := cells.NewRouter(table)
	if err := router.Start(ctx); err != nil {
		panic(err)
	}
	defer router.Close()
	gates := cells.NewGates("cell-a", router)

	job, err := gates.Admit(ctx, cells.AdmitRequest{Tenant: "acme", Internal: true, Label: "nightly"})
	if err != nil {
		panic(err)
	}
	defer job.Done()
	go func() { _ = ctrl.Move(ctx, cells.MovePlan{TenantID: "acme", FromCell: "cell-a", ToCell: "cell-b"}) }()

	<-job.Context().Done()
	answer := cells.AnswerOf(context.Cause(job.Context()))
	fmt.Println("the job stops:", answer.Code)
	// Output:
	// the job stops: MOVING
}
