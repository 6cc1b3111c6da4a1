// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// surveyAge is how old a preflight's survey may be for the preparation that follows it.
const surveyAge = 5 * time.Second

// maxAsked bounds the surveys that are kept.
const maxAsked = 256

// asked keeps what a preflight was told until the preparation of that move asks the same,
// once: for a small tenant the two surveys are much of what a move takes. A preflight is
// always answered by the store. What a survey finds is advice about schemas and settings;
// what a move's safety rests on is checked by the transactions of its steps.
type asked struct {
	mu sync.Mutex // guards of
	of map[askedFor]answered
}

type askedFor struct {
	tenant         cells.TenantID
	source, target cells.CellID
	group          GroupID
}

type answered struct {
	survey Survey
	at     time.Time
}

// askedOf says what a survey is for; ok is false if the context does not tell of a move.
func askedOf(ctx context.Context, tenant cells.TenantID) (askedFor, bool) {
	m := MoveOf(ctx)
	return askedFor{tenant, m.Source, m.Target, GroupOf(ctx)}, m.Source != "" && m.Target != ""
}

func (a *asked) keep(ctx context.Context, tenant cells.TenantID, s Survey) {
	key, ok := askedOf(ctx, tenant)
	if !ok {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.of == nil || len(a.of) >= maxAsked {
		old := a.of
		a.of = map[askedFor]answered{}
		for k, s := range old {
			if time.Since(s.at) < surveyAge && len(a.of) < maxAsked/2 {
				a.of[k] = s
			}
		}
	}
	a.of[key] = answered{s, time.Now()}
}

// take returns a survey that is young enough, and forgets it.
func (a *asked) take(ctx context.Context, tenant cells.TenantID) (Survey, bool) {
	key, ok := askedOf(ctx, tenant)
	if !ok {
		return Survey{}, false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	s, ok := a.of[key]
	delete(a.of, key)
	return s.survey, ok && time.Since(s.at) < surveyAge
}

// surveyedSource is a store as the source of moves whose preflights this agent has answered.
type surveyedSource struct {
	Source
	asked *asked
}

func (s surveyedSource) Survey(ctx context.Context, tenant cells.TenantID) (Survey, error) {
	if out, ok := s.asked.take(ctx, tenant); ok {
		return out, nil
	}
	return s.Source.Survey(ctx, tenant)
}
