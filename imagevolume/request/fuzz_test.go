package request_test

import (
	"path"
	"path/filepath"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"go.podman.io/image/v5/docker/reference"

	"github.com/ocihold/ocihold/imagevolume/request"
)

func FuzzForContainer(f *testing.F) {
	for _, tc := range bad {
		if len(tc.text) < 1<<12 {
			f.Add(tc.key, tc.text, "server")
		}
	}
	f.Add(pod, "- image: llama:7b\n  mountPath: /models\n  exec: true", "server")
	f.Add(server, `[{"image":"llama","mountPath":"/models"},{"image":"a@sha256:`+strings.Repeat("a", 64)+`","mountPath":"/b"}]`, "server")
	f.Add(pod, "- images:\n  - {image: a, subPath: w/x, mediaTypes: ['*model*']}\n  - image: b\n  mountPath: /m\n  readOnly: false\n  scratchSize: 1GiB", "server")
	f.Fuzz(func(t *testing.T, key, text, container string) {
		annotations := map[string]string{key: text}
		volumes, err := request.ForContainer(web, annotations, container)
		again, errAgain := request.ForContainer(web, annotations, container)
		require.Equal(t, volumes, again)
		if err != nil {
			require.EqualError(t, errAgain, err.Error())
			require.Empty(t, volumes)
			require.NotContains(t, err.Error(), "\n")
			require.True(t, utf8.ValidString(err.Error()))
			require.Contains(t, err.Error(), "shop/web-0")
			if container == "server" {
				require.Contains(t, err.Error(), "container server ")
			}
			return
		}
		require.Subset(t, request.All(annotations), volumes)
		for i, v := range volumes {
			require.Equal(t, key, v.Key)
			require.NotEmpty(t, v.Sources)
			require.LessOrEqual(t, len(v.Sources), 8)
			for _, s := range v.Sources {
				require.Contains(t, []request.PullPolicy{request.Always, request.IfNotPresent, request.Never}, s.PullPolicy)
				_, err := reference.ParseAnyReference(s.Image)
				require.NoError(t, err)
				for _, pattern := range s.MediaTypes {
					_, err := path.Match(pattern, "a/b")
					require.NoError(t, err)
				}
				if s.SubPath != "" {
					require.True(t, filepath.IsLocal(s.SubPath))
					require.Equal(t, path.Join("a", s.SubPath), "a/"+s.SubPath)
					require.Less(t, len(s.SubPath), 4096)
					require.False(t, strings.ContainsFunc(s.SubPath, unicode.IsControl))
				}
			}
			if v.Scratch == "" {
				require.Zero(t, v.ScratchSize)
			} else {
				require.GreaterOrEqual(t, v.ScratchSize, int64(request.MinScratchSize))
				require.LessOrEqual(t, v.ScratchSize, int64(request.MaxScratchSize))
			}
			require.Equal(t, path.Join("/", v.MountPath), v.MountPath)
			require.NotEqual(t, "/", v.MountPath)
			require.Less(t, len(v.MountPath), 4096)
			require.True(t, utf8.ValidString(v.MountPath))
			require.False(t, strings.ContainsFunc(v.MountPath, unicode.IsControl))
			require.NotContains(t, v.MountPath, ":")
			for _, dir := range []string{"/proc/", "/sys/", "/dev/"} {
				require.False(t, strings.HasPrefix(v.MountPath+"/", dir))
			}
			for _, other := range volumes[:i] {
				require.False(t, strings.HasPrefix(v.MountPath+"/", other.MountPath+"/"))
				require.False(t, strings.HasPrefix(other.MountPath+"/", v.MountPath+"/"))
			}
		}
	})
}
