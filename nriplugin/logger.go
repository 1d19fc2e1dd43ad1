package nriplugin

import (
	"context"

	nrilog "github.com/containerd/nri/pkg/log"
	"github.com/sirupsen/logrus"
)

// logger passes what the NRI library says of each event on as debug lines, and
// its warnings and errors as such.
type logger struct{ log logrus.FieldLogger }

var _ nrilog.Logger = logger{}

func (l logger) Debugf(_ context.Context, format string, args ...any) { l.log.Debugf(format, args...) }

func (l logger) Infof(_ context.Context, format string, args ...any) { l.log.Debugf(format, args...) }

func (l logger) Warnf(_ context.Context, format string, args ...any) { l.log.Warnf(format, args...) }

func (l logger) Errorf(_ context.Context, format string, args ...any) { l.log.Errorf(format, args...) }
